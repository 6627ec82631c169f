"""Weight of the main loss as a default argument of models with auxiliary losses."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.config.moe import MoEConfig, has_side_losses
from megatron.core.distributed import unwrapped
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.pipeline_parallel.program_losses import takes_main_loss


def _has_aux_losses(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return isinstance(config, MoEConfig) and has_side_losses(config)


def supply_main_loss(chunks: Sequence[nn.Module], weight: Tensor) -> None:
    """Register a forward pre-hook on each model chunk that takes ``main_loss``: a forward step that does not pass it
    gets ``MainLoss(weight)``. ``weight`` is kept by reference, so that later values count. The hook raises UserError in
    training if a model with auxiliary losses gets neither ``main_loss`` nor ``loss_mask``: a task's loss is a sum over
    masked tokens, and its auxiliary losses would have another weight."""
    default = MainLoss(weight)

    def supply(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = kwargs if kwargs.get("main_loss") else signature(model.forward).bind_partial(*args, **kwargs).arguments
        if given.get("main_loss") is not None:
            return args, kwargs
        if given.get("loss_mask") is None and model.training and torch.is_grad_enabled() and _has_aux_losses(model):
            raise UserError(
                "forward_step: the model has auxiliary losses, but gets neither loss_mask nor main_loss; pass "
                "loss_mask, the mask of the tokens that the main loss sums over"
            )
        return args, {**kwargs, "main_loss": default}

    for model in map(unwrapped, chunks):
        if takes_main_loss(model):
            model.register_forward_pre_hook(supply, with_kwargs=True)
