"""Losses between layer outputs of a trained model and a frozen teacher on the same pipeline stage.

Forward hooks on the teacher's layers store their outputs in the :class:`LayerTargets` of the micro-batch, which both
models receive in their context; a hook on the student's layer attaches the loss there, so that pipeline stages exchange
nothing. Definitions of NVIDIA ModelOpt: mean of squared differences over the channels, or 1 - cosine.

Legend: s sequence (local), b batch, h hidden."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.distillation import LayerPair
from megatron.core.pipeline_parallel.stage_model import unwrapped
from megatron.core.statistics import StepStatistics
from megatron.core.transformer.aux_losses import attach_loss
from megatron.core.transformer.recompute import is_recomputing

LOSS = "layer loss"


class LayerTargets:
    """Outputs of the teacher's layers in one micro-batch. ``loss_mask``: this context-parallel rank's part, [b, s];
    ``weight``: 0-d factor of a sum over tokens before backward."""

    def __init__(self, loss_mask: Tensor, weight: Tensor) -> None:
        self.loss_mask, self.weight = loss_mask, weight
        self.outputs: dict[LayerPair, Tensor] = {}


class LayerLoss(nn.Module):
    """Forward hook of a student's layer that attaches the loss of ``pair`` times ``factor`` to its output."""

    def __init__(self, pair: LayerPair, factor: float) -> None:
        super().__init__()
        self.pair, self.factor = pair, factor
        self.statistics = StepStatistics(f"layers {pair}", **{LOSS: 2})

    def end_step(self, totals: Mapping[str, Tensor]) -> None:
        """Ignore the sums over the global batch, which are only logged."""

    def forward(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return ``output`` with the loss attached. Without sequence parallelism all tensor-parallel ranks compute the
        same gradient of the replicated output, as the layers after it do."""
        targets = args[1].layer_targets
        if targets is None or not torch.is_grad_enabled():
            return output
        mask_sb = args[1].layout.stream_part(targets.loss_mask.transpose(0, 1))
        dtype = torch.promote_types(output.dtype, torch.float32)
        student, teacher = (x.to(dtype).flatten(0, 1) for x in (output, targets.outputs[self.pair]))
        if self.pair.loss == "mse":
            losses = (student - teacher).square().mean(-1)
        else:
            losses = F.cosine_embedding_loss(student, teacher, student.new_ones(1), reduction="none")
        total = (losses.view_as(mask_sb) * mask_sb).sum()
        if not is_recomputing():
            self.statistics.add(LOSS, torch.stack((total.detach().double(), mask_sb.sum().double())))
        return attach_loss(output, self.factor * total, targets.weight)


def connect_layers(student: nn.Module, teacher: nn.Module, pairs: Iterable[LayerPair], factor: float) -> None:
    """Add hooks to the layers of ``pairs``, which both chunks hold; ``factor`` multiplies each loss."""
    for pair in pairs:
        module, loss = _module(student, pair.student), LayerLoss(pair, factor)
        module.add_module(f"loss_{pair}", loss)  # where statistics are found; it has no parameters
        module.register_forward_hook(loss)
        _module(teacher, pair.teacher).register_forward_hook(partial(_store, pair))


def _module(chunk: nn.Module, number: int | None) -> nn.Module:
    """Return layer ``number`` (from 1) of ``chunk``; None: all its layers and the final norm."""
    decoder: Any = unwrapped(chunk).get_submodule("decoder")
    return decoder if number is None else decoder.layers.get_submodule(str(number - 1))


def _store(pair: LayerPair, layer: nn.Module, args: Any, output: Tensor) -> None:
    if (targets := args[1].layer_targets) is not None:
        targets.outputs[pair] = output
