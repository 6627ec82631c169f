"""Conventions of ``loss_func`` in programs written for Megatron-LM: a sum over tokens, or a mean.

``loss_func(output)`` returns

* ``(loss, num_tokens, {name: tensor})``: ``loss`` is the **sum** of the token losses of the micro-batch and
  ``num_tokens`` the number of tokens that it sums over; each logged value is a pair ``[sum, count]`` or a mean; or
* ``(loss, {name: tensor})``: ``loss`` is a mean, and all micro-batches have equal weight (the older convention).

The number of tokens is known only after the forward pass, so these losses are normalized after the backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.config.moe import MoEConfig, has_side_losses
from megatron.core.pipeline_parallel.loss_weights import MainLoss

FORMS = "(sum of token losses, number of tokens, dict) or (mean loss, dict)"


def split_loss(returned: tuple, num_values: int | None = None) -> tuple[Tensor, Tensor, Mapping[str, object]]:
    """Return ``(loss to differentiate, number of tokens, logged values)``; a mean loss counts as one token.
    ``num_values`` is the number of values for the first micro-batch. Raises UserError if ``returned`` follows neither
    convention, or not the convention of the first micro-batch (a sum over tokens and a mean cannot be added)."""
    check_returned(returned, num_values)
    loss, logged = returned[0], returned[-1]
    num_tokens = returned[1] if len(returned) == 3 else 1
    return loss, torch.as_tensor(num_tokens, device=loss.device).detach().reshape(()), logged


def check_returned(returned: object, num_values: int | None = None) -> None:
    """Raise UserError if a result of ``loss_func`` follows neither convention, (tensor, number of tokens, mapping) or
    (tensor, mapping); has another number of values than ``num_values`` (None: any); or contains a differentiable loss
    that is not a scalar."""
    values = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    kinds = ", ".join(_kind(value) for value in values)
    fits = len(values) in (2, 3) and isinstance(values[0], Tensor) and isinstance(values[-1], Mapping)
    if not fits or (len(values) == 3 and not _is_number(values[1])):
        raise UserError(f"loss_func: returned {len(values)} values ({kinds}); return {FORMS}")
    if num_values is not None and len(values) != num_values:
        raise UserError(
            f"loss_func: returned {len(values)} values ({kinds}), and {num_values} for the first micro-batch; return "
            f"{FORMS} for all of them"
        )
    if values[0].requires_grad and not _is_number(values[0]):
        raise UserError(f"loss_func: returned a loss of shape {list(values[0].shape)}; return {FORMS}")


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _kind(value: object) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def takes_main_loss(model: nn.Module) -> bool:
    """Return whether ``model`` may have auxiliary losses, and therefore takes ``main_loss``."""
    return "main_loss" in signature(model.forward).parameters


class MainLossInput:
    """Forward pre-hook that passes ``main_loss`` to a model that :func:`takes_main_loss`, unless the program does.
    Keeps the number of tokens in the model's ``loss_mask`` for :meth:`check`."""

    def __init__(self, main_loss: MainLoss | None = None) -> None:
        self.main_loss = main_loss
        self._masked_tokens: Tensor | None = None
        self._checks: bool | None = None
        """Whether the next loss is checked; None before the first forward pass."""

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, object]) -> tuple[tuple, dict[str, object]]:
        """Return ``args`` and ``kwargs`` with ``main_loss`` added, unless ``kwargs`` has it. For a model with auxiliary
        losses of experts also keep the sum of its ``loss_mask`` (None: no mask) for :meth:`check`."""
        if self._checks is None:
            config = getattr(model, "config", None)
            self._checks = isinstance(config, MoEConfig) and has_side_losses(config)
        if self._checks:
            loss_mask = signature(model.forward).bind_partial(*args, **kwargs).arguments.get("loss_mask")
            self._masked_tokens = None if loss_mask is None else loss_mask.sum()
        return args, {"main_loss": self.main_loss, **kwargs}

    def check(self, num_tokens: Tensor | None) -> None:
        """Raise UserError if the main loss and the model's ``loss_mask`` would give auxiliary losses a wrong weight:
        only one of ``num_tokens`` (None: a mean) and the mask exists, or their counts differ by more than 0.1 %. Checks
        only the first micro-batch of a model with auxiliary losses of experts, because reading the counts waits for the
        device."""
        if not self._checks:
            return
        self._checks, mask_sum = False, self._masked_tokens
        if num_tokens is None and mask_sum is None:
            return
        if num_tokens is None or mask_sum is None or not math.isclose(float(num_tokens), float(mask_sum), rel_tol=1e-3):
            have = "a mean" if num_tokens is None else f"a sum over {float(num_tokens):g} tokens"
            want = "none, as of a mean" if mask_sum is None else f"that of {float(mask_sum):g} tokens"
            raise UserError(
                f"losses of experts would have a wrong weight: loss_func returns {have}, and the model's loss_mask was "
                f"{want}; pass the mask of this rank's tokens, which the sum is over, or for a mean loss_mask=None"
            )
