"""Gemma 2 (``Gemma2ForCausalLM``): norms on both sides of every branch, soft caps, windows in every other layer."""

from __future__ import annotations

from typing import Any

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families.gemma import COMMON as GEMMA
from megatron.core.export.hf.families.gemma import GEGLU
from megatron.core.export.hf.families.llama import AROUND, ATTENTION, FEED_FORWARD
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import Weights
from megatron.core.export.hf.settings import Choice, Computed, Ignored, Ours, Rule, Table, get, refuse


def cap(key: str, default: float | None) -> Computed:
    """A soft cap, under one name in both; null says that there is none."""
    return Computed((key,), (key,), lambda config: {key: config.get(key, default)}, lambda ours: {key: ours[key]})


def _load_scale(config: Table) -> dict[str, Any]:
    scalar, channels = get(config, ("query_pre_attn_scalar",), 256), get(config, ("head_dim",), 256)
    return {"softmax_scale": None if scalar == channels else scalar**-0.5}


def _save_scale(settings: Table) -> dict[str, Any]:
    scale = settings["softmax_scale"]
    scalar = settings["kv_channels"] if scale is None else round(scale**-2, 6)
    if scalar != int(scalar):
        raise refuse("softmax_scale", scale, "only 1 / the square root of a whole number can be said")
    return {"query_pre_attn_scalar": int(scalar)}


SCALE = Computed(("query_pre_attn_scalar",), ("softmax_scale",), _load_scale, _save_scale)
COMMON: tuple[Rule, ...] = (
    *GEMMA, groups(4), SCALE, Ours({"norm_placement": "sandwich"}), Ignored(("cache_implementation", "hidden_act")),
    Choice("hidden_activation", GEGLU, default="gelu_pytorch_tanh"),
)  # fmt: skip
WEIGHTS: Weights = {
    **AROUND, **ATTENTION, **FEED_FORWARD,
    "decoder.layers.*.post_self_attention_layernorm": "model.layers.*.post_attention_layernorm",
    "decoder.layers.*.pre_mlp_layernorm": "model.layers.*.pre_feedforward_layernorm",
    "decoder.layers.*.post_mlp_layernorm": "model.layers.*.post_feedforward_layernorm",
}  # fmt: skip

FAMILY = Family(
    "gemma2", "Gemma2ForCausalLM",
    config=(
        *COMMON, Rope(), Window(4096, every=2), cap("attn_logit_softcapping", 50.0),
        cap("final_logit_softcapping", 30.0),
    ),
    weights=WEIGHTS,
)  # fmt: skip
