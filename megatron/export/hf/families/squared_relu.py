"""Models with squared ReLU and no gate: Nemotron-4 and Minitron (``nemotron``), Arcee's AFM (``arcee``)."""

from __future__ import annotations

from megatron.export.hf.attention_settings import Rope, groups
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Weights
from megatron.export.hf.settings import Choice, Fixed, Ignored, Rule, Same

WEIGHTS: Weights = {**llama.WEIGHTS, "decoder.layers.*.mlp.linear_fc1": "model.layers.*.mlp.up_proj"}
COMMON: tuple[Rule, ...] = (
    *llama.SIZES, llama.FFN, llama.HEAD_SIZE, groups(), *llama.DROPOUT, llama.tied(False),
    Choice("hidden_act", {"relu2": {"squared_relu": True}}, default="relu2"),
    Same("add_bias_linear", "attention_bias", default=False), Same("add_bias_linear", "mlp_bias", default=False),
)  # fmt: skip

NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    models="Nemotron-4, Minitron",
    config=(
        *COMMON,
        Rope(share=0.5),
        Same("norm_epsilon", "norm_eps", default=1e-5),
        Fixed({"normalization": "LayerNorm", "apply_layernorm_1p": True}),
        Ignored(("rope_percent", "kv_channels", "hidden_dropout")),
    ),
    weights=WEIGHTS,
)
"""LayerNorm that stores its weights minus one; half of the channels are rotated."""

ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    models="AFM-4.5B",
    config=(*COMMON, llama.DIVISIBLE, *llama.rms_norm(1e-5), Rope()),
    weights=WEIGHTS,
)
