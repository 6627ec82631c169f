"""Lazy tensors: read from a file, or computed from other lazy tensors, on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LazyTensor:
    """Tensor of known shape and dtype; ``read()`` loads or computes the values on the CPU and caches nothing.
    Checkpoint converters process one lazy tensor at a time, so that the model need not fit into memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    read_rows: Callable[[int, int], Tensor] | None = None
    """Cheaper equivalent of ``read()[start:stop]``, or None. Used for stacked experts, which are read one by one."""

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor in memory, on any device; ``read()`` returns the tensor itself, not a copy."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop``; without ``read_rows`` the full tensor is read for it."""
        return self.read()[start:stop] if self.read_rows is None else self.read_rows(start, stop)
