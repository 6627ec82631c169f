"""Models of images and text: Qwen3.5 and Qwen3-VL, dense and with experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.vlm.towers import CHANNELS
from megatron.export.hf.attention_settings import Rope, Window, groups, rope_table
from megatron.export.hf.families import gated_delta, llama, mixtures
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import BlockParts, TensorLayout, Weights
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Ignored, Rule, Same, Table, get, refuse

TEXT, VISION = "text_config", "vision_config"
_LAYERS, _HF = "vision.blocks.layers.*", "model.visual.blocks.*"


class AxesRope(gated_delta.TextRope):
    """Rotary positions with three axes, interleaved. ``sections`` are the default sections."""

    def __init__(self, sections: tuple[int, ...], *, base: float = 10000.0, share: float | None = None) -> None:
        super().__init__(base, share=share)
        self.settings = (*self.settings, "mrope_section")
        self.sections = sections

    def load(self, config: Table) -> dict[str, object]:
        table = rope_table(config)
        if not table.get("mrope_interleaved", True):
            raise refuse("mrope_interleaved", False, "which cannot be converted: only true can")
        return {**super().load(config), "mrope_section": list(table.get("mrope_section", self.sections))}

    def save(self, settings: Table) -> dict[str, object]:
        if settings["mrope_section"] is None:
            raise refuse("mrope_section", None, "the family has three axes")
        saved = super().save(settings)
        scaling = saved.pop("rope_scaling") or {}
        axes = {"mrope_section": settings["mrope_section"], "mrope_interleaved": True}
        return {"rope_parameters": {"rope_type": "default", **saved, **scaling, **axes}}


class Patches(TensorLayout):
    """Weight of a convolution over full patches: local [v, values], HF [v, channels, (frames,) rows, columns]."""

    def __init__(self, name: str, settings: Table, *, has_frames: bool = True) -> None:
        super().__init__(name)
        frames = (settings["vision_frames"],) if has_frames else ()
        self.values = (CHANNELS, *frames, settings["vision_patch_size"], settings["vision_patch_size"])

    def shape(self, views, ndim):  # type: ignore[no-untyped-def]
        return super().shape(views, ndim) if ndim == 1 else (len(views[0]), *self.values)


class StackedColumns(TensorLayout):
    """All experts in one HF tensor [e, in, out]; local [e, 2, f, h] (gate, linear) or [e, h, f]."""

    def views(self, local, config):  # type: ignore[no-untyped-def]
        return [[local.movedim(-1, 1)]]

    def shape(self, views, ndim):  # type: ignore[no-untyped-def]
        experts, rows, *columns = views[0].shape
        return experts, rows, math.prod(columns)


def _tower(settings: Table) -> Weights:
    """Return the tensors of the vision tower."""
    channels = settings["vision_hidden_size"] // settings["vision_num_attention_heads"]

    def rows(config: TransformerConfig) -> tuple[int, ...]:
        return (channels,) * 3

    plain = {
        "vision.position_embeddings": "model.visual.pos_embed",
        **{f"vision.merger.{name}": f"model.visual.merger.{name}" for name in ("norm", "linear_fc1", "linear_fc2")},
        f"{_LAYERS}.input_layernorm": f"{_HF}.norm1",
        f"{_LAYERS}.pre_mlp_layernorm": f"{_HF}.norm2",
        f"{_LAYERS}.self_attention.linear_proj": f"{_HF}.attn.proj",
        **{f"{_LAYERS}.mlp.{name}": f"{_HF}.mlp.{name}" for name in ("linear_fc1", "linear_fc2")},
        **{
            f"vision.deep_mergers.{number}.{name}": f"model.visual.deepstack_merger_list.{number}.{name}"
            for number in range(len(settings["vision_deepstack_layers"] or ()))
            for name in ("norm", "linear_fc1", "linear_fc2")
        },
    }
    return {
        **plain,
        "vision.patch_embed": Patches("model.visual.patch_embed.proj", settings),
        f"{_LAYERS}.self_attention.linear_qkv": BlockParts([f"{_HF}.attn.qkv"], [(0, 1, 2)], rows),
    }


def _inside(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``weights`` with the names of a text model within a larger one."""

    def inside(name: str) -> str:
        return name.replace("model.", gated_delta.BASE, 1) if name.startswith("model.") else name

    return {
        local: inside(layout) if isinstance(layout, str) else layout.renamed([*map(inside, layout.names)])
        for local, layout in weights.items()
    }


def _output_size(config: Table) -> dict[str, object]:
    size = get(config, (f"{VISION}.out_hidden_size",), 3584)
    if size != get(config, ("hidden_size",)):
        raise refuse(f"{VISION}.out_hidden_size", size, f"but hidden_size is {config['hidden_size']}")
    return {}


SIZES: tuple[Rule, ...] = (
    Fixed({"vision_model_type": "qwen"}),
    *(Same(setting, f"{VISION}.{key}", default=default) for setting, key, default in (
        ("vision_num_layers", "depth", 27), ("vision_hidden_size", "hidden_size", 1152),
        ("vision_num_attention_heads", "num_heads", 16), ("vision_ffn_hidden_size", "intermediate_size", 4304),
        ("vision_patch_size", "patch_size", 16), ("vision_frames", "temporal_patch_size", 2),
        ("vision_merge_size", "spatial_merge_size", 2), ("vision_num_positions", "num_position_embeddings", 2304))),
    FixedKeys({f"{VISION}.hidden_act": "gelu_pytorch_tanh", f"{VISION}.in_channels": CHANNELS}),
    Computed((f"{VISION}.out_hidden_size",), ("hidden_size",), _output_size,
             lambda settings: {f"{VISION}.out_hidden_size": settings["hidden_size"]}),
    Ignored((
        "video_token_id", "vision_start_token_id", "vision_end_token_id",
        *(f"{VISION}.{key}" for key in ("model_type", "initializer_range", "dtype", "torch_dtype", "rope_parameters",
                                        "transformers_version")),
    )),
)  # fmt: skip
OF_QWEN3_5: tuple[Rule, ...] = (
    Same("image_token_id", "image_token_id", default=248056),
    FixedKeys({f"{VISION}.deepstack_visual_indexes": []}, written=False),
    Fixed({"vision_deepstack_layers": None}),
)
OF_QWEN3_VL: tuple[Rule, ...] = (
    Same("image_token_id", "image_token_id", default=151655),
    Computed(
        (f"{VISION}.deepstack_visual_indexes",),
        ("vision_deepstack_layers",),
        lambda config: {
            "vision_deepstack_layers": list(get(config, (f"{VISION}.deepstack_visual_indexes",), (8, 16, 24)))
        },
        lambda settings: {f"{VISION}.deepstack_visual_indexes": settings["vision_deepstack_layers"] or []},
    ),
)
OUTER = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _with_images(
    text: Family, kind: str, architecture: str, rope: AxesRope, rules: tuple[Rule, ...], models: str = ""
) -> Family:
    """Return the family of models with the vision tower and the text model of ``text``."""
    config = [rope if isinstance(rule, Rope) else rule for rule in text.config if not isinstance(rule, Window)]
    return replace(
        text,
        model_type=kind,
        architecture=architecture,
        models=models or f"{text.models}, with images",
        container=None,
        parts={TEXT: f"{kind}_text", VISION: f"{kind}_vision"},
        outer=OUTER,
        config=(*config, *SIZES, *rules),
        weights=_inside(text.weights),
        alternatives=_inside(text.alternatives),
        names=_tower,
        model_family="vlm",
    )


QWEN3_5_IMAGES = _with_images(
    gated_delta.QWEN3_5, "qwen3_5", "Qwen3_5ForConditionalGeneration", AxesRope((11, 11, 10), share=0.25), OF_QWEN3_5
)
QWEN3_5_MOE_IMAGES = _with_images(
    gated_delta.QWEN3_5_MOE,
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    AxesRope((11, 11, 10), share=0.25),
    OF_QWEN3_5,
)
QWEN3_VL = _with_images(
    llama.QWEN3,
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    AxesRope((24, 20, 20), base=500000.0),
    OF_QWEN3_VL,
    "Qwen3-VL",
)
"""Outputs of deep layers of the tower are added to the first layers."""
OTHER_EXPERTS = {"num_moe_experts", "moe_router_topk", "moe_router_pre_softmax", "num_query_groups"}
"""Settings whose rules differ from those of Qwen3 with experts."""
QWEN3_VL_MOE = _with_images(
    replace(
        mixtures.QWEN3_MOE,
        config=(
            *(rule for rule in mixtures.QWEN3_MOE.config if not OTHER_EXPERTS.intersection(rule.settings)),
            groups(16), Fixed({"moe_router_pre_softmax": False}), FixedKeys({"norm_topk_prob": True}),
            Same("num_moe_experts", "num_experts", "num_local_experts", default=60),
            Same("moe_router_topk", "num_experts_per_tok", default=4),
        ),
        weights={
            **llama.WEIGHTS, "decoder.layers.*.mlp.router": "model.layers.*.mlp.gate",
            "decoder.layers.*.mlp.experts.linear_fc1.weight": StackedColumns("model.layers.*.mlp.experts.gate_up_proj"),
            "decoder.layers.*.mlp.experts.linear_fc2.weight": StackedColumns("model.layers.*.mlp.experts.down_proj"),
        },
    ),
    "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", AxesRope((24, 20, 20), base=500000.0), OF_QWEN3_VL,
    "Qwen3-VL with experts",
)  # fmt: skip
"""Experts as in published files, which transformers transposes; a new model of transformers is saved untransposed."""
