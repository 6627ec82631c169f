"""Changes of weights after the optimizer step, as the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer.weight_edits import WeightEdit
from megatron.core.transformer.qk_clip import QKClip
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.optimizer import gives_logits


def _build_qk_clip(model: Sequence[nn.Module], cfg: PretrainConfig, groups: ProcessGroups) -> WeightEdit | None:
    """Build QK-Clip, or only its measurement of logits."""
    if cfg.model.qk_clip or cfg.model.log_max_attention_logit:
        return QKClip(model, cfg.model, groups)
    if cfg.logging.log_layer_statistics_interval is None or not gives_logits(cfg):
        return None
    try:
        return QKClip(model, cfg.model, groups)
    except UserError:  # attention of another kind
        return None


BUILDERS: tuple[Callable[[Sequence[nn.Module], PretrainConfig, ProcessGroups], WeightEdit | None], ...] = (
    _build_qk_clip,
)
"""Functions (chunks, configuration, groups) -> edit, None if it is off. Collective."""


def build_weight_edits(model: Sequence[nn.Module], cfg: PretrainConfig, groups: ProcessGroups) -> list[WeightEdit]:
    """Build the edits that ``cfg`` enables for the chunks ``model``, in the order in which they run. Collective."""
    return [edit for build in BUILDERS if (edit := build(model, cfg, groups)) is not None]
