"""Granite 3 (``granite``): LLaMA with factors of embeddings, scores, branches and logits."""

from __future__ import annotations

from megatron.export.hf.attention_settings import Rope, groups
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Computed, Same, Table, get


def _load_scale(config: Table) -> dict[str, object]:
    scale, channels = get(config, ("attention_multiplier",), 1.0), llama.HEAD_SIZE.load(config)["kv_channels"]
    return {"softmax_scale": None if scale == channels**-0.5 else scale}


def _save_scale(settings: Table) -> dict[str, object]:
    return {"attention_multiplier": settings["softmax_scale"] or settings["kv_channels"] ** -0.5}


GRANITE = Family(
    "granite", "GraniteForCausalLM", models="Granite 3, dense",
    config=(
        *llama.SIZES, llama.FFN, llama.HEAD_SIZE, groups(), *llama.rms_norm(), *llama.DROPOUT, llama.tied(False),
        llama.SILU_GATED, Rope(), Computed(("attention_multiplier",), ("softmax_scale",), _load_scale, _save_scale),
        Same("add_bias_linear", "attention_bias", default=False), Same("add_bias_linear", "mlp_bias", default=False),
        *(Same(name, name, default=1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
    ),
    weights=llama.WEIGHTS,
)  # fmt: skip
