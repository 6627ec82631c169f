"""Description of models that read images. Torch-free.

The tower's parameters and operations belong to the embedding."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.config.problems import Settings
from megatron.core.config.vision import VisionConfig
from megatron.core.description.model import ModelDescription
from megatron.core.models.gpt import description as gpt
from megatron.core.models.vlm.operations import tower_operations
from megatron.core.models.vlm.towers import tower_parameters

SETTINGS = (
    "vision_model_type", "vision_num_layers", "vision_hidden_size", "vision_num_attention_heads",
    "vision_ffn_hidden_size", "vision_patch_size", "vision_frames", "vision_merge_size", "vision_num_positions",
    "vision_deepstack_layers", "vision_feature_layer", "img_h", "img_w", "disable_vision_class_token", "image_token_id",
    "mrope_section",
)  # fmt: skip
"""Settings that the meaning of the weights depends on."""


def describe_settings(cfg: Settings, vocab_size: int) -> ModelDescription:
    """Return the description of the model that ``cfg`` defines."""
    described = gpt.describe_settings(cfg, vocab_size)
    embedding, vision = described.embedding, cfg.group(VisionConfig)
    params = (*embedding.params, *tower_parameters(cfg.model, vision))
    ops = (*embedding.ops, *tower_operations(cfg.model, vision, cfg.data.seq_length))
    settings = (*embedding.settings, *SETTINGS)
    return replace(described, embedding=replace(embedding, params=params, ops=ops, settings=settings))
