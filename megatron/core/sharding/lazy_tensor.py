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

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """``tensor``, which is in memory already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)
