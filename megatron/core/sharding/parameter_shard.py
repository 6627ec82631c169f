"""Parameter shards that this rank's optimizer updates; the same type for ZeRO-1, FSDP and unsharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.fusions.storage import Storage
from megatron.core.groups.process_groups import Group


@dataclass(eq=False)
class ParameterShard:
    """Flat element range ``start`` to ``stop`` of this rank's (tensor- or expert-parallel) part of a parameter."""

    parameter: nn.Parameter
    start: int
    stop: int
    values: Tensor
    """Weights of the range, a view of the model's memory; the optimizer writes to it."""
    gradient: Callable[[], Tensor | None]
    """Returns the gradient in the shape of ``values`` (a view of a gradient buffer if there is one), or None."""
    compute_dtype: torch.dtype
    """Dtype that the model computes in; ``values`` may have higher precision (fp32 shards of FSDP)."""
    rows_over: Group | None = None
    """Ranks that hold the other rows in equal chunks (FSDP); None: the ranges of other ranks are not known."""
    storage: Storage | None = None
    """Storage of ``values``; the optimizer sets it. An all-gather of a declared storage sends its payload."""

    @property
    def is_full(self) -> bool:
        """Whether the range covers the parameter."""
        return (self.start, self.stop) == (0, self.parameter.numel())

    @property
    def max_elements(self) -> int:
        """Elements of the largest shard among the ranks that hold other rows; equal on these ranks."""
        if self.rows_over is None:
            return self.stop - self.start
        shape = self.parameter.shape
        return -(-shape[0] // self.rows_over.size) * (shape.numel() // shape[0])


def full_shard(parameter: nn.Parameter) -> ParameterShard:
    """Return a shard that covers the full parameter: ``values`` is the parameter itself (in its shape, not flat), and
    its gradient function returns ``main_grad`` if set, else ``grad``, at each call."""

    def gradient() -> Tensor | None:
        main_grad = getattr(parameter, "main_grad", None)
        return parameter.grad if main_grad is None else main_grad

    return ParameterShard(parameter, 0, parameter.numel(), parameter, gradient, parameter.dtype)
