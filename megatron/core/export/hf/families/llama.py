"""LLaMA 2 and 3.x (``LlamaForCausalLM``)."""

from megatron.core.export.hf.attention_settings import GROUPS, Rope
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import Halves, QueryKeyValue, Weights
from megatron.core.export.hf.settings import Begin, Choice, Ours, Same

SIZES = (
    Same("num_layers", "num_hidden_layers"),
    Same("hidden_size", "hidden_size"),
    Same("num_attention_heads", "num_attention_heads"),
    GROUPS,
    Same("vocab_size", "vocab_size"),
)
HEAD_SIZE = Same("kv_channels", "head_dim", default=lambda c: c["hidden_size"] // c["num_attention_heads"])
RMS_NORM = (Ours({"normalization": "RMSNorm"}), Same("norm_epsilon", "rms_norm_eps", default=1e-6))
DROPOUT = (Same("attention_dropout", "attention_dropout", default=0.0), Begin({"hidden_dropout": 0.0}))
TIED = Choice(
    "tie_word_embeddings",
    {value: {"untie_embeddings_and_output_weights": not value} for value in (False, True)}, default=False,
)  # fmt: skip
SILU_GATED = Choice("hidden_act", {"silu": {"swiglu": True}, "swish": {"swiglu": True}}, default="silu")

ATTENTION: Weights = {
    "decoder.layers.*.input_layernorm": "model.layers.*.input_layernorm",
    "decoder.layers.*.self_attention.linear_qkv":
        QueryKeyValue(*(f"model.layers.*.self_attn.{each}_proj" for each in "qkv")),
    "decoder.layers.*.self_attention.linear_proj": "model.layers.*.self_attn.o_proj",
    "decoder.layers.*.self_attention.q_layernorm": "model.layers.*.self_attn.q_norm",
    "decoder.layers.*.self_attention.k_layernorm": "model.layers.*.self_attn.k_norm",
    "decoder.layers.*.pre_mlp_layernorm": "model.layers.*.post_attention_layernorm",
}  # fmt: skip
FEED_FORWARD: Weights = {
    "decoder.layers.*.mlp.linear_fc1": Halves("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "decoder.layers.*.mlp.linear_fc2": "model.layers.*.mlp.down_proj",
}
AROUND: Weights = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}

FAMILY = Family(
    "llama", "LlamaForCausalLM",
    config=(
        *SIZES, HEAD_SIZE, *RMS_NORM, *DROPOUT, TIED, SILU_GATED, Rope(),
        Same("ffn_hidden_size", "intermediate_size"),
        Same("max_position_embeddings", "max_position_embeddings", default=2048),
        Same("add_bias_linear", "attention_bias", default=False),
        Same("add_bias_linear", "mlp_bias", default=False),
    ),
    weights={**AROUND, **ATTENTION, **FEED_FORWARD},
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip
