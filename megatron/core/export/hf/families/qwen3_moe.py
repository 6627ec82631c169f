"""Qwen3-MoE (``Qwen3MoeForCausalLM``): Qwen3 with mixtures of experts in all layers, or in some."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layer_settings import EXPERT_LAYERS
from megatron.core.export.hf.settings import Choice, Ignored, Ours, Rule, Same, Theirs

MIXTURE: tuple[Rule, ...] = (
    EXPERT_LAYERS,
    Choice("norm_topk_prob", {each: {"moe_router_pre_softmax": not each} for each in (False, True)}, default=False),
    Same("moe_ffn_hidden_size", "moe_intermediate_size"),
    Ignored(("router_aux_loss_coef", "output_router_logits")),
)
"""What Qwen's mixtures have in common."""

FAMILY = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM",
    config=(
        *llama.common(), llama.FFN, llama.HEAD_SIZE, groups(4), Rope(), llama.NO_BIASES, *MIXTURE,
        Window(4096, switch=True), Ours({"qk_layernorm": True}), Theirs({"attention_bias": False}),
        Ignored(("max_window_layers",)),
        Same("num_moe_experts", "num_experts", "num_local_experts", default=128),
        Same("moe_router_topk", "num_experts_per_tok", default=8),
    ),
    weights={**llama.AROUND, **llama.ATTENTION, **llama.FEED_FORWARD, **llama.EXPERTS},
)  # fmt: skip
