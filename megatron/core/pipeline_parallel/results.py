"""Results of the micro-batches of a global batch, and the two conventions of ``loss_func``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class MicroBatchResult:
    """The result of one micro-batch. Tensors stay on their device: nothing here waits for the GPU."""

    num_tokens: Tensor
    """int64 or float scalar: tokens (or, for mean losses, 1) that the loss is a sum over."""
    logged: dict[str, Tensor] = field(default_factory=dict)
    """``name -> float64 [sum, count]``."""
    non_loss: object = None
    """The result of ``collect_non_loss_data``."""


def as_sum_and_count(value: Tensor | tuple | float) -> Tensor:
    """A logged value as a float64 pair [sum, count]; a plain mean counts once."""
    if isinstance(value, tuple | list):
        value = torch.stack([torch.as_tensor(part, dtype=torch.float64) for part in value])
    value = torch.as_tensor(value).detach().to(torch.float64)
    return value if value.numel() == 2 else torch.stack([value.reshape(()), torch.ones_like(value.reshape(()))])


def split_loss(returned: tuple) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Both conventions of ``loss_func`` as ``(loss to differentiate, num_tokens, {name: [sum, count]})``."""
    if len(returned) == 3:
        loss, num_tokens, logged = returned
    elif len(returned) == 2:
        loss, logged = returned
        num_tokens = torch.ones((), dtype=torch.int64, device=loss.device)
    else:
        raise ValueError(f"loss_func returned {len(returned)} values; give (loss, num_tokens, dict) or (loss, dict)")
    pairs = {name: as_sum_and_count(value) for name, value in logged.items()}
    return loss, torch.as_tensor(num_tokens).detach(), pairs
