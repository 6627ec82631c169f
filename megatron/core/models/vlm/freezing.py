"""Parts of a model that are not trained: --freeze-LM, --freeze-ViT, --freeze-vision-projection."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.core.config.problems import Settings
from megatron.core.config.vision import VisionConfig
from megatron.core.description.model import ModelDescription, Op, Piece, forward_only
from megatron.core.models.transforms import ModelTransform
from megatron.core.models.vlm.operations import PROJECTION, TOWER
from megatron.core.sharding.named_slices import stored_parameters

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.groups.process_groups import ProcessGroups


class Freezing(ModelTransform):
    """The frozen parts of ``vision``. Checkpoints contain them."""

    def __init__(self, vision: VisionConfig) -> None:
        self.vision = vision

    def freezes(self, name: str) -> bool:
        """Return whether the parameter ``name`` is not trained."""
        if name.startswith(PROJECTION):
            return self.vision.freeze_vision_projection
        return self.vision.freeze_ViT if name.startswith(TOWER) else self.vision.freeze_LM

    def apply(self, model: nn.Module, groups: ProcessGroups) -> None:
        for name, param in stored_parameters(model):
            if self.freezes(name):
                param.requires_grad_(False)

    def describe(self, model: ModelDescription) -> ModelDescription:
        return model.with_pieces(self._changed)

    def _changed(self, piece: Piece) -> Piece:
        params = tuple(replace(param, frozen=self.freezes(param.name)) for param in piece.params)
        return replace(piece, params=params, ops=tuple(map(self._changed_op, piece.ops)))

    def _changed_op(self, op: Op) -> Op:
        if not self.freezes(op.name):
            return op
        if op.name.startswith(TOWER) and self.vision.freeze_ViT:  # nothing before it has a gradient
            return forward_only(op)
        return replace(op, backward=1.0) if op.kind == "gemm" else op


def freezing(cfg: Settings) -> Freezing | None:
    """Return the transform of the flags that freeze; None without any."""
    vision = cfg.group(VisionConfig)
    return Freezing(vision) if vision.freeze_LM or vision.freeze_ViT or vision.freeze_vision_projection else None
