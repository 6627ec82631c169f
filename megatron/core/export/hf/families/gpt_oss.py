"""GPT-OSS in bf16 (``GptOssForCausalLM``): sinks, windows in every other layer, clamped experts with biases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import Layout
from megatron.core.export.hf.settings import Ignored, Ours, Same, Theirs

if TYPE_CHECKING:
    from torch import Tensor


class Interleaved(Layout):
    """Experts in one tensor [e, in, out], gate and linear half in turn: ours [e, 2, f, h] and [e, h, f]."""

    def views(self, ours: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        return [[ours.permute(0, *range(ours.ndim - 1, 0, -1))]]

    def shape(self, views: Sequence[Tensor], ndim: int) -> tuple[int, ...]:
        kept = views[0].shape[:ndim]
        return (*kept, math.prod(views[0].shape[ndim:]))


FAMILY = Family(
    "gpt_oss", "GptOssForCausalLM",
    config=(
        *llama.SIZES, groups(8), *llama.rms_norm(1e-5), *llama.DROPOUT, llama.tied(False),
        Rope(150000.0, kinds=("linear", "llama3", "yarn")),  # where nothing is said it is YaRN there
        Window(128, every=2), Same("kv_channels", "head_dim", default=64),
        Ours({"add_bias_linear": True, "quick_geglu": True, "glu_linear_offset": 1.0, "softmax_type": "learnable",
              "moe_layer_freq": 1, "moe_router_pre_softmax": False}),
        Same("activation_func_clamp_value", "swiglu_limit", default=7.0),
        Same("num_moe_experts", "num_local_experts", "num_experts"),
        Same("moe_router_topk", "num_experts_per_tok", "experts_per_token"),
        Same("moe_ffn_hidden_size", "intermediate_size"), Same("ffn_hidden_size", "intermediate_size", written=False),
        Theirs({"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": 1.702}),
        Ignored(("router_aux_loss_coef", "output_router_logits", "initial_context_length")),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION,
        "decoder.layers.*.self_attention.core_attention.softmax_offset": "model.layers.*.self_attn.sinks",
        "decoder.layers.*.mlp.router": "model.layers.*.mlp.router",
        **{f"decoder.layers.*.mlp.experts.{ours}": Interleaved(f"model.layers.*.mlp.experts.{theirs}")
           for ours, theirs in (("linear_fc1.weight", "gate_up_proj"), ("linear_fc1.bias", "gate_up_proj_bias"),
                                ("linear_fc2.weight", "down_proj"), ("linear_fc2.bias", "down_proj_bias"))},
    },
)  # fmt: skip
