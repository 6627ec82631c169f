"""Micro-batch results, and the two return conventions of ``loss_func``: a sum over tokens, or a mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import UserError


@dataclass
class MicroBatchResult:
    """Result of one micro-batch. Tensors stay on their device; creating it does not wait for the GPU."""

    num_tokens: Tensor
    """Number of tokens that the loss sums over (int64 or float scalar); 1 for a mean loss."""
    logged: dict[str, Tensor] = field(default_factory=dict)
    """Logged values: name -> fp64 [sum, count]."""
    non_loss: object = None
    """Return value of ``loss_func`` with ``collect_non_loss_data``."""


def as_sum_and_count(value: Tensor | tuple | float) -> Tensor:
    """Convert a logged value to an fp64 tensor [sum, count] on its device, detached; it may share the value's memory. A
    pair, or a tensor of two elements, is taken as it is; a single number, a mean, gets count 1. Does not wait."""
    if isinstance(value, tuple | list):
        value = torch.stack([torch.as_tensor(part, dtype=torch.float64) for part in value])
    value = torch.as_tensor(value).detach().to(torch.float64)
    return value if value.numel() == 2 else torch.stack([value.reshape(()), torch.ones_like(value.reshape(()))])


def split_loss(returned: tuple, num_values: int | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Convert a result of ``loss_func`` to ``(loss to differentiate, num_tokens, {name: [sum, count]})``.
    ``num_tokens`` is 1 for a mean loss. ``num_values`` is the number of values for the first micro-batch. Raises
    UserError if ``returned`` follows neither convention, or not the convention of the first micro-batch (a sum over
    tokens and a mean cannot be added)."""
    check_returned(returned, num_values)
    if len(returned) == 3:
        loss, num_tokens, logged = returned
    else:
        loss, logged = returned
        num_tokens = torch.ones((), dtype=torch.int64, device=loss.device)
    pairs = {name: as_sum_and_count(value) for name, value in logged.items()}
    return loss, torch.as_tensor(num_tokens).detach().reshape(()), pairs


def check_returned(returned: Any, num_values: int | None = None) -> None:
    """Raise UserError if a result of ``loss_func`` follows neither convention, (tensor, number of tokens, mapping) or
    (tensor, mapping); has another number of values than ``num_values`` (None: any); or contains a differentiable loss
    that is not a scalar."""
    values = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    kinds = ", ".join(_kind(value) for value in values)
    forms = "(sum of token losses, number of tokens, dict) or (mean loss, dict)"
    fits = len(values) in (2, 3) and isinstance(values[0], Tensor) and isinstance(values[-1], Mapping)
    if not fits or (len(values) == 3 and not _is_number(values[1])):
        raise UserError(f"loss_func: returned {len(values)} values ({kinds}); return {forms}")
    if num_values is not None and len(values) != num_values:
        raise UserError(
            f"loss_func: returned {len(values)} values ({kinds}), and {num_values} for the first micro-batch; return "
            f"{forms} for all of them"
        )
    if values[0].requires_grad and not _is_number(values[0]):
        raise UserError(f"loss_func: returned a loss of shape {list(values[0].shape)}; return {forms}")


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _kind(value: Any) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
