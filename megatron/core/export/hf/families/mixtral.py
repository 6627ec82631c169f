"""Mixtral (``MixtralForCausalLM``): Mistral whose feed-forward networks are mixtures of experts."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import Halves
from megatron.core.export.hf.settings import Ignored, Ours, Same

FAMILY = Family(
    "mixtral", "MixtralForCausalLM",
    config=(
        *llama.common(1e-5), llama.HEAD_SIZE, groups(8), llama.NO_BIASES, Rope(1e6), Window(),
        Same("num_moe_experts", "num_local_experts", "num_experts", default=8),
        Same("moe_router_topk", "num_experts_per_tok", default=2),
        Same("moe_ffn_hidden_size", "intermediate_size"), Same("ffn_hidden_size", "intermediate_size", written=False),
        Ours({"moe_layer_freq": 1}),
        Ignored(("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION,
        "decoder.layers.*.mlp.router": "model.layers.*.block_sparse_moe.gate",
        "decoder.layers.*.mlp.experts.linear_fc1": Halves(
            "model.layers.*.block_sparse_moe.experts.*.w1", "model.layers.*.block_sparse_moe.experts.*.w3"
        ),
        "decoder.layers.*.mlp.experts.linear_fc2": "model.layers.*.block_sparse_moe.experts.*.w2",
    },
)  # fmt: skip
