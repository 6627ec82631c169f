"""LLaMA 2 and 3.x (``LlamaForCausalLM``), and what other families have in common with it."""

from megatron.core.export.hf.attention_settings import Rope, groups
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import Halves, QueryKeyValue, Weights
from megatron.core.export.hf.settings import Begin, Choice, Ours, Rule, Same, same

SIZES = same(
    num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
    vocab_size="vocab_size", max_position_embeddings="max_position_embeddings",
)  # fmt: skip
FFN = Same("ffn_hidden_size", "intermediate_size")
HEAD_SIZE = Same("kv_channels", "head_dim", default=lambda c: c["hidden_size"] // c["num_attention_heads"])
DROPOUT = (Same("attention_dropout", "attention_dropout", default=0.0), Begin({"hidden_dropout": 0.0}))
SILU_GATED = Choice("hidden_act", {"silu": {"swiglu": True}, "swish": {"swiglu": True}}, default="silu")
NO_BIASES = Ours({"add_bias_linear": False})


def tied(default: bool) -> Choice:
    """Whether the output layer is the embedding."""
    options = {value: {"untie_embeddings_and_output_weights": not value} for value in (False, True)}
    return Choice("tie_word_embeddings", options, default)


def rms_norm(default: float = 1e-6) -> tuple[Rule, ...]:
    """RMSNorm; ``default``: of its epsilon."""
    return Ours({"normalization": "RMSNorm"}), Same("norm_epsilon", "rms_norm_eps", default=default)


def common(epsilon: float = 1e-6) -> tuple[Rule, ...]:
    """What most families say alike."""
    return *SIZES, *rms_norm(epsilon), *DROPOUT, tied(False), SILU_GATED


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
EXPERTS: Weights = {
    "decoder.layers.*.mlp.router": "model.layers.*.mlp.gate",
    "decoder.layers.*.mlp.experts.linear_fc1":
        Halves("model.layers.*.mlp.experts.*.gate_proj", "model.layers.*.mlp.experts.*.up_proj"),
    "decoder.layers.*.mlp.experts.linear_fc2": "model.layers.*.mlp.experts.*.down_proj",
}  # fmt: skip
AROUND: Weights = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}

FAMILY = Family(
    "llama", "LlamaForCausalLM",
    config=(
        *common(), FFN, HEAD_SIZE, groups(), Rope(),
        Same("add_bias_linear", "attention_bias", default=False), Same("add_bias_linear", "mlp_bias", default=False),
    ),
    weights={**AROUND, **ATTENTION, **FEED_FORWARD},
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip
