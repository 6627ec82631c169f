"""Changes of weights after the optimizer step, as the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer.weight_edits import WeightEdit
from megatron.core.transformer.qk_clip import QKClip


def _build_qk_clip(model: Sequence[nn.Module], config: TransformerConfig, groups: ProcessGroups) -> WeightEdit | None:
    return QKClip(model, config, groups) if config.qk_clip or config.log_max_attention_logit else None


BUILDERS: tuple[Callable[[Sequence[nn.Module], TransformerConfig, ProcessGroups], WeightEdit | None], ...] = (
    _build_qk_clip,
)
"""Functions (chunks, configuration, groups) -> edit, None if it is off. Collective."""


def build_weight_edits(
    model: Sequence[nn.Module], config: TransformerConfig, groups: ProcessGroups
) -> list[WeightEdit]:
    """Build the edits that ``config`` enables for the chunks ``model``, in the order in which they run. Collective."""
    return [edit for build in BUILDERS if (edit := build(model, config, groups)) is not None]
