"""A tensor that is somewhere else until it is read: in a file, or to be computed from other such tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LazyTensor:
    """Shape and dtype are known; ``read()`` returns the values, on the CPU, and keeps nothing.

    Converters pass these on one at a time, so that a model never has to fit into memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    read_rows: Callable[[int, int], Tensor] | None = None
    """``read()[start:stop]``, where that costs less: experts are large, and read one at a time."""

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """``tensor``, which is in memory already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def rows(self, start: int, stop: int) -> Tensor:
        """``read()[start:stop]``."""
        return self.read()[start:stop] if self.read_rows is None else self.read_rows(start, stop)
