"""Qwen1.5-MoE and Qwen2-MoE (``Qwen2MoeForCausalLM``): mixtures of experts beside a gated shared expert."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.families.qwen3_moe import MIXTURE
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import Halves
from megatron.core.export.hf.settings import Choice, Ours, Same

SHARED = "model.layers.*.mlp.shared_expert"

FAMILY = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM",
    config=(
        *llama.common(), llama.FFN, llama.HEAD_SIZE, groups(16), Rope(), *MIXTURE,
        Window(4096, switch=True, first="max_window_layers"),
        Ours({"add_bias_linear": False, "moe_shared_expert_gate": True}),
        Choice("qkv_bias", {each: {"add_qkv_bias": each} for each in (True, False)}, default=True),
        Same("num_moe_experts", "num_experts", default=60),
        Same("moe_router_topk", "num_experts_per_tok", default=4),
        Same("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=5632),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION, **llama.FEED_FORWARD, **llama.EXPERTS,
        "decoder.layers.*.mlp.shared_experts.gate_weight": f"{SHARED}_gate.weight",
        "decoder.layers.*.mlp.shared_experts.linear_fc1": Halves(f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
        "decoder.layers.*.mlp.shared_experts.linear_fc2": f"{SHARED}.down_proj",
    },
)  # fmt: skip
