"""The parts of parameters that this rank updates. Optimizers step over these and need not know who cut them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterShard:
    """Elements ``start`` to ``stop``, in the order of memory, of this rank's part of a parameter."""

    parameter: nn.Parameter
    start: int
    stop: int
    values: Tensor
    """The model's own memory of them: what an update is written to."""
    gradient: Callable[[], Tensor | None]
    """Their gradient, in the shape of ``values``; a view wherever it lives in a buffer."""
    compute_dtype: torch.dtype
    """The values that the model computes with; ``values`` may be more exact."""


def whole(parameter: nn.Parameter) -> ParameterShard:
    """All of a parameter, with the gradient from ``main_grad`` (a data-parallel buffer) or ``grad``."""

    def gradient() -> Tensor | None:
        main_grad = getattr(parameter, "main_grad", None)
        return parameter.grad if main_grad is None else main_grad

    return ParameterShard(parameter, 0, parameter.numel(), parameter, gradient, parameter.dtype)
