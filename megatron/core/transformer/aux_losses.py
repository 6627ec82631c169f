"""Auxiliary losses attached inside the model (MoE balancing, router z-loss), weighted per valid token.

:func:`attach_loss` attaches a loss to the module's output, so that its gradient starts in the backward of that module
and pipeline stages need not send it on. The main loss is the sum over valid tokens times a weight that is known before
the forward pass. An auxiliary loss that is a mean over a sequence (or a micro-batch) is multiplied by its valid tokens
and the same weight (``AuxLossWeights``), which gives a token-weighted mean over the global batch. Multi-token
prediction (``multi_token_prediction.py``) attaches its losses to the main losses, whose gradient gives the weight of a
token."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.autograd_context import AutogradContext


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(loss, scale)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        loss, scale = ctx.saved_tensors
        return grads[0], scale.to(loss.dtype).expand_as(loss), None


def attach_loss(values: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """Return a view of ``values`` whose backward also propagates ``scale`` (0-d) as the gradient of ``loss`` (0-d)."""
    return _Attach.apply(values, loss, scale)
