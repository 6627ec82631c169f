"""GLM-4 of 2024 (``glm``), GLM-4-0414 (``glm4``) and GLM-4.5 (``glm4_moe``)."""

from __future__ import annotations

from megatron.export.hf.attention_settings import Rope, groups
from megatron.export.hf.families import llama, mixtures
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Weights
from megatron.export.hf.settings import Choice, Fixed, Ignored, Rule, Same

QKV_BIAS = {value: {"add_qkv_bias": value} for value in (True, False)}
COMMON: tuple[Rule, ...] = (
    *llama.SIZES, llama.FFN, *llama.DROPOUT, llama.tied(False), llama.SILU_GATED, llama.NO_BIASES,
    Rope(share=0.5),
)  # fmt: skip
DENSE: tuple[Rule, ...] = (
    *COMMON, *llama.rms_norm(1.5625e-7), groups(2), Same("kv_channels", "head_dim", default=128),
    Choice("attention_bias", QKV_BIAS, default=True), Fixed({"rotary_interleaved": True}), llama.NO_PADDING,
)  # fmt: skip
WEIGHTS: Weights = {**llama.WEIGHTS, "decoder.layers.*.mlp.linear_fc1": "model.layers.*.mlp.gate_up_proj"}

GLM = Family(
    "glm",
    "GlmForCausalLM",
    models="GLM-4-9B of 2024",
    config=DENSE,
    weights=WEIGHTS,
    unused=(r".*\.rotary_emb\.inv_freq",),
)
"""Half of the channels are rotated, in neighboring pairs; one matrix holds the gate and the linear half."""

GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    models="GLM-4-0414, GLM-Z1",
    config=(*DENSE, Fixed({"norm_placement": "sandwich"})),
    weights={
        **WEIGHTS,
        "decoder.layers.*.post_self_attention_layernorm": "model.layers.*.post_self_attn_layernorm",
        "decoder.layers.*.post_mlp_layernorm": "model.layers.*.post_mlp_layernorm",
    },
)
"""GLM with norms before and after each branch."""

GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", models="GLM-4.5, GLM-4.6",
    limits=("fp8 files of compressed-tensors",),
    config=(
        *COMMON, *llama.rms_norm(1e-5), groups(8), llama.HEAD_SIZE, Choice("attention_bias", QKV_BIAS, default=False),
        Same("qk_layernorm", "use_qk_norm", default=False), mixtures.first_dense(1),
        *mixtures.SIGMOID_ROUTER, mixtures.SHARED_EXPERTS, mixtures.PREDICTION,
        Ignored(("output_router_logits", "router_aux_loss_coef")),
    ),
    weights={
        **llama.WEIGHTS, **llama.EXPERTS, **mixtures.shared_expert("model.layers.*.mlp.shared_experts"),
        **mixtures.EXPERT_BIAS, **mixtures.PREDICTION_WEIGHTS,
    },
    repeated=mixtures.PREDICTION_COPIES,
    counts_if_held=mixtures.PREDICTION_IF_HELD,
    unused=(mixtures.PREDICTION_UNUSED, r".*\.rotary_emb\.inv_freq"),
)  # fmt: skip
"""Grouped-query attention with the experts, the router and the multi-token prediction of DeepSeek-V3."""
