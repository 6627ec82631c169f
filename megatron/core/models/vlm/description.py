"""Description of models that read images. Torch-free.

The tower's parameters belong to the embedding. Its operations depend on the images and are not counted.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.config.problems import Settings
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.description.model import Config, LayerPlace, ModelDescription, Param
from megatron.core.description.parts import norm
from megatron.core.models.common.description import encoder_layer
from megatron.core.models.gpt import description as gpt

CHANNELS = 3
SETTINGS = (
    "vision_model_type", "vision_num_layers", "vision_hidden_size", "vision_num_attention_heads",
    "vision_ffn_hidden_size", "vision_patch_size", "vision_frames", "vision_merge_size", "vision_num_positions",
    "vision_deepstack_layers", "image_token_id", "mrope_section",
)  # fmt: skip
"""Settings that the meaning of the weights depends on."""


def tower_config(language: Config, vision: VisionConfig) -> TransformerConfig:
    """Return the configuration of the tower's layers: sizes of ``vision``, formats and initial values of ``language``,
    one rank."""
    same = (
        "bf16", "fp16", "fp64", "init_method_std", "perform_initialization", "seed", "deterministic_mode",
        "attention_backend", "no_persist_layer_norm",
    )  # fmt: skip
    return TransformerConfig(
        num_layers=vision.vision_num_layers,
        hidden_size=vision.vision_hidden_size,
        num_attention_heads=vision.vision_num_attention_heads,
        ffn_hidden_size=vision.vision_ffn_hidden_size,
        norm_epsilon=1e-6,
        bias_gelu_fusion=True,  # the tanh approximation
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **{name: getattr(language, name) for name in same},
    )


def patch_values(vision: VisionConfig) -> int:
    """Return the numbers in a patch: channels x frames x rows x columns."""
    return CHANNELS * vision.vision_frames * vision.vision_patch_size**2


def describe_settings(cfg: Settings, vocab_size: int) -> ModelDescription:
    """Return the description of the model that ``cfg`` defines."""
    described = gpt.describe_settings(cfg, vocab_size)
    params = (*described.embedding.params, *tower_parameters(cfg.model, cfg.group(VisionConfig)))
    settings = (*described.embedding.settings, *SETTINGS)
    return replace(described, embedding=replace(described.embedding, params=params, settings=settings))


def tower_parameters(language: Config, vision: VisionConfig) -> list[Param]:
    """Return the parameters of the tower, which every rank holds."""
    config = tower_config(language, vision)
    width, joined = config.hidden_size, config.hidden_size * vision.vision_merge_size**2
    norms, linears = {"merger.norm": width}, {"patch_embed": (width, patch_values(vision))}
    deep = [f"deep_mergers.{number}" for number in range(len(vision.vision_deepstack_layers or ()))]
    norms |= {f"{name}.norm": joined for name in deep}
    for name in ("merger", *deep):
        linears |= {f"{name}.linear_fc1": (joined, joined), f"{name}.linear_fc2": (language.hidden_size, joined)}
    params = [Param("position_embeddings.weight", (vision.vision_num_positions, width))]
    params += [param for name, size in norms.items() for param in norm(name, size, config)]
    for name, shape in linears.items():
        params += [Param(f"{name}.weight", shape), Param(f"{name}.bias", shape[:1], ndim=1)]
    for index in range(config.num_layers):
        for branch in encoder_layer(config, LayerPlace(index + 1, 1, causal=False)):
            params += [replace(param, mesh={}) for param in branch.under(f"blocks.layers.{index}.").params]
    return [replace(param, name=f"vision.{param.name}") for param in params]
