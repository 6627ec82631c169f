"""Auxiliary losses attached inside the model (MoE balancing, router z-loss), weighted per valid token.

:func:`attach_loss` attaches a loss to the module's output, so that its gradient starts in the backward of that module
and pipeline stages need not send it on. The main loss is a sum over valid tokens, and all gradients are divided by the
valid tokens of the global batch at the end. An auxiliary loss that is a mean over a sequence (or a micro-batch) is
therefore multiplied by its valid tokens, which gives a token-weighted mean. Multi-token prediction
(``multi_token_prediction.py``) attaches its losses to the main losses, whose gradient gives the token weight.

Legend: b batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class AuxLossWeights(NamedTuple):
    """Weights of auxiliary losses in a micro-batch."""

    tokens_b: Tensor
    """fp32 [b]: valid tokens of each full sequence, over all tensor- and context-parallel ranks. If the main loss is a
    mean over this rank's tokens, they sum to the number of context-parallel ranks.
    """
    scale: Tensor
    """0-d: factor that multiplies the main loss before backward."""


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(loss, scale)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        loss, scale = ctx.saved_tensors
        return grads[0], scale.to(loss.dtype).expand_as(loss), None


def attach_loss(values: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """Return a view of ``values`` whose backward also propagates ``scale`` (0-d) as the gradient of ``loss`` (0-d)."""
    return _Attach.apply(values, loss, scale)
