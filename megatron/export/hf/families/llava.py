"""LLaVA 1.5: LLaMA or Mistral with the tower of CLIP or SigLIP.

Layers after the one with the features of images, and the last norm of the tower, have no effect; they are not loaded,
and a copy of the original folder keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.vlm.towers import CHANNELS, TOWERS
from megatron.export.hf.attention_settings import Rope, Window, groups
from megatron.export.hf.families import llama
from megatron.export.hf.families.vision_language import TEXT, VISION, Patches
from megatron.export.hf.layouts import BlockParts, TensorLayout, Weights
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Ignored, Same, Table, get, refuse

_LAYERS, _HF = "vision.blocks.layers.*", "vision_tower.encoder.layers.*"
_EMBEDDINGS = "vision_tower.embeddings"
KINDS = {
    "clip": ("clip_vision_model", "quick_gelu", 1e-5),
    "siglip": ("siglip_vision_model", "gelu_pytorch_tanh", 1e-6),
}
"""Name of a tower -> its model_type, activation and epsilon in ``transformers``."""
SIZES = {
    "vision_num_layers": ("num_hidden_layers", 12),
    "vision_hidden_size": ("hidden_size", 768),
    "vision_num_attention_heads": ("num_attention_heads", 12),
    "vision_ffn_hidden_size": ("intermediate_size", 3072),
}


class ClassEmbedding(TensorLayout):
    """Class token: local [1, v], HF [v]."""

    def shape(self, views, ndim):  # type: ignore[no-untyped-def]
        return (views[0].shape[-1],)


def _tower(settings: Table) -> Weights:
    """Return the tensors of the vision tower."""
    channels = settings["vision_hidden_size"] // settings["vision_num_attention_heads"]

    def rows(config: TransformerConfig) -> tuple[int, ...]:
        return (channels,) * 3

    return {
        "vision.position_embeddings": f"{_EMBEDDINGS}.position_embedding",
        "vision.patch_embed": Patches(f"{_EMBEDDINGS}.patch_embedding", settings, has_frames=False),
        "vision.class_embedding.weight": ClassEmbedding(f"{_EMBEDDINGS}.class_embedding"),
        "vision.first_norm": "vision_tower.pre_layrnorm",
        "vision.merger.linear_fc1": "multi_modal_projector.linear_1",
        "vision.merger.linear_fc2": "multi_modal_projector.linear_2",
        f"{_LAYERS}.input_layernorm": f"{_HF}.layer_norm1",
        f"{_LAYERS}.pre_mlp_layernorm": f"{_HF}.layer_norm2",
        f"{_LAYERS}.self_attention.linear_proj": f"{_HF}.self_attn.out_proj",
        f"{_LAYERS}.self_attention.linear_qkv": BlockParts(
            [f"{_HF}.self_attn.{letter}_proj" for letter in "qkv"], [(0,), (1,), (2,)], rows
        ),
        **{f"{_LAYERS}.mlp.linear_fc{number}": f"{_HF}.mlp.fc{number}" for number in (1, 2)},
    }


def _load_tower(config: Table) -> dict[str, object]:
    """Return the settings of ``vision_config``. Raises UserError for a tower that is neither CLIP's nor SigLIP's."""
    model_type = get(config, (f"{VISION}.model_type",), "clip_vision_model")
    kind = next((name for name, (value, *_) in KINDS.items() if value == model_type), None)
    if kind is None:
        raise refuse(f"{VISION}.model_type", model_type, f"known: {', '.join(value for value, *_ in KINDS.values())}")
    _, activation, epsilon = KINDS[kind]
    for key, value in (("hidden_act", activation), ("layer_norm_eps", epsilon)):
        if get(config, (f"{VISION}.{key}",), value) != value:
            raise refuse(f"{VISION}.{key}", config[f"{VISION}.{key}"], f"which cannot be represented: only {value} can")
    strategy = get(config, ("vision_feature_select_strategy",), "default")
    if strategy not in ("default", "full") or (kind == "siglip" and strategy == "default"):
        raise refuse("vision_feature_select_strategy", strategy, "which drops a patch of siglip; known: default, full")
    side = get(config, (f"{VISION}.image_size",), 224)
    return {
        "vision_model_type": kind, "img_h": side, "img_w": side,
        "disable_vision_class_token": kind == "clip" and strategy == "default",
        "vision_patch_size": get(config, (f"{VISION}.patch_size",), 32 if kind == "clip" else 16),
        "image_mean": TOWERS[kind].sizes["image_mean"], "image_std": TOWERS[kind].sizes["image_std"],
        "image_fit": TOWERS[kind].sizes["image_fit"],
    }  # fmt: skip


def _save_tower(settings: Table) -> dict[str, object]:
    kind = settings["vision_model_type"]
    if kind not in KINDS:
        raise refuse("vision_model_type", kind, f"the family has {' or '.join(KINDS)}")
    if settings["img_h"] != settings["img_w"]:
        raise refuse("img_w", settings["img_w"], f"the family has square images, and --img-h is {settings['img_h']}")
    model_type, activation, epsilon = KINDS[kind]
    side, patch = settings["img_h"], settings["vision_patch_size"]
    drops = settings["disable_vision_class_token"]
    tokens = (side // patch) ** 2 + (kind == "clip" and not drops)
    part = {"model_type": model_type, "hidden_act": activation, "layer_norm_eps": epsilon, "image_size": side,
            "patch_size": patch}  # fmt: skip
    part |= {"vision_use_head": False} if kind == "siglip" else {}
    strategy = {"vision_feature_select_strategy": "default" if drops else "full", "image_seq_length": tokens}
    return {**{f"{VISION}.{key}": value for key, value in part.items()}, **strategy}


def _head_size(config: Table) -> int:
    return get(config, ("hidden_size",), 4096) // get(config, ("num_attention_heads",), 32)


def _load_text(config: Table) -> dict[str, object]:
    kind = get(config, (f"{TEXT}.model_type",), "llama")
    if kind not in ("llama", "mistral"):
        raise refuse(f"{TEXT}.model_type", kind, "which cannot be converted within llava; known: llama, mistral")
    for key in ("sliding_window", "num_key_value_heads") if kind == "mistral" else ():
        if key not in config:  # the defaults of Mistral differ from those of LLaMA
            raise refuse(f"{TEXT}.{key}", None, "which mistral must have; write its value into config.json")
    return {}


def _save_text(settings: Table) -> dict[str, object]:
    return {f"{TEXT}.model_type": "llama" if settings["window_size"] is None else "mistral"}


def _inside(weights: Mapping[str, TensorLayout | str]) -> Weights:
    """Return ``weights`` with the names of a text model within a larger one."""
    return {
        name: f"language_model.{layout}"
        if isinstance(layout, str)
        else layout.renamed([f"language_model.{part}" for part in layout.names])
        for name, layout in weights.items()
    }


LLAVA = replace(
    llama.LLAMA,
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    models="LLaVA 1.5",
    limits=("text models other than LLaMA and Mistral", "features of several layers"),
    parts={TEXT: "llama", VISION: "clip_vision_model"},
    outer=(
        "image_token_index", "image_seq_length", "projector_hidden_act", "vision_feature_select_strategy",
        "vision_feature_layer", "multimodal_projector_bias",
    ),
    config=(
        Same("num_layers", "num_hidden_layers", default=32), Same("hidden_size", "hidden_size", default=4096),
        Same("num_attention_heads", "num_attention_heads", default=32),
        Same("vocab_size", "vocab_size", default=32000),
        Same("max_position_embeddings", "max_position_embeddings", default=2048),
        Same("ffn_hidden_size", "intermediate_size", default=11008),
        Same("kv_channels", "head_dim", default=_head_size),
        *llama.rms_norm(), *llama.DROPOUT, llama.tied(False), llama.SILU_GATED, groups(heads=32), Rope(), Window(),
        Same("add_bias_linear", "attention_bias", default=False), Same("add_bias_linear", "mlp_bias", default=False),
        *(Same(name, f"{VISION}.{key}", default=default) for name, (key, default) in SIZES.items()),
        Same("image_token_id", "image_token_index", "image_token_id", default=32000),
        Same("vision_feature_layer", "vision_feature_layer", default=-2),
        FixedKeys({
            f"{VISION}.num_channels": CHANNELS, "projector_hidden_act": "gelu", "multimodal_projector_bias": True,
            f"{VISION}.attention_dropout": 0.0,
        }),
        Computed(
            (*(f"{VISION}.{key}" for key in ("model_type", "hidden_act", "layer_norm_eps", "image_size", "patch_size")),
             "vision_feature_select_strategy", "image_seq_length"),
            ("vision_model_type", "img_h", "img_w", "vision_patch_size", "disable_vision_class_token"),
            _load_tower, _save_tower,
        ),
        Computed((f"{TEXT}.model_type",), ("window_size",), _load_text, _save_text),
        Fixed({"vision_frames": 1, "vision_merge_size": 1}),
        Ignored(tuple(f"{VISION}.{key}" for key in (
            "initializer_range", "initializer_factor", "projection_dim", "vocab_size", "vision_use_head", "dtype",
            "torch_dtype", "transformers_version",
        ))),
    ),
    weights=_inside(llama.WEIGHTS),
    names=_tower,
    prefixes={
        "vision_tower.vision_model.": "vision_tower.", "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.", "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
    modules={
        "language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head",
        "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
    },
    base="language_model.model.",
    unused=(
        *llama.LLAMA.unused, r"vision_tower\.(post_layernorm|head)\..*", r"vision_tower\.embeddings\.position_ids",
        r"vision_tower\.encoder\.layers\..*",
    ),
    model_family="vlm",
)  # fmt: skip
