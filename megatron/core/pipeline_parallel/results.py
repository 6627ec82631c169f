"""Results of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.pipeline_parallel.loss_weights import LossPairs


@dataclass
class MicroBatchResult:
    """Result of one micro-batch. Tensors stay on their device; creating it does not wait for the GPU."""

    logged: dict[str, Tensor] = field(default_factory=dict)
    """Losses: name -> fp64 [sum, count]."""
    non_loss: object = None
    """Return value of ``loss_func`` with ``collect_non_loss_data``."""


def logged_pairs(losses: LossPairs) -> dict[str, Tensor]:
    """Return detached fp64 tensors [sum, count]; UserError unless ``losses`` maps names to (sum, count)."""
    if not isinstance(losses, Mapping) or not all(len(pair) == 2 for pair in losses.values()):
        raise UserError(f"loss_func: returned {type(losses).__name__}; return {{name: (sum of losses, count)}}")
    return {name: as_sum_and_count(tuple(pair)) for name, pair in losses.items()}


def as_sum_and_count(value: object) -> Tensor:
    """Convert a logged value to an fp64 tensor [sum, count] on its device, detached; it may share the value's memory. A
    pair, or a tensor of two elements, is taken as it is; a single number, a mean, gets count 1. Does not wait."""
    if isinstance(value, tuple | list):
        value = torch.stack([torch.as_tensor(part).detach().to(torch.float64).reshape(()) for part in value])
    value = torch.as_tensor(value).detach().to(torch.float64)
    return value if value.numel() == 2 else torch.stack([value.reshape(()), torch.ones_like(value.reshape(()))])
