"""Losses of modules in the middle of a model, such as the auxiliary losses of routers.

Such a loss is attached to the values that leave the module (:func:`attach_loss`): its gradient starts in the backward
pass where the module is, so that no pipeline stage has to hand it on. The main loss is a sum over valid tokens, and all
gradients are divided by the valid tokens of the global batch at the end; a side loss that is a mean over a sequence (or
a micro-batch) therefore counts as often as there are valid tokens in it, which makes it a token-weighted mean.
Further predictions (``multi_token_prediction.py``) attach theirs to the main losses, whose gradient says what a token
weighs.

Legend: b batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class SideLosses(NamedTuple):
    """How much a side loss weighs in a micro-batch."""

    tokens_b: Tensor
    """fp32 [b]: tokens of each whole sequence, those of all tensor- and context-parallel ranks, whose loss counts.
    Where the main loss is a mean over this rank's tokens they sum to the number of context-parallel ranks."""
    scale: Tensor
    """0-d: what the main loss is multiplied by before its backward pass."""


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
    """``values``, whose backward pass also goes through ``loss`` (0-d) times ``scale`` (0-d)."""
    return _Attach.apply(values, loss, scale)
