"""LLaMA 2 and 3.x, dense families that differ from it by a line or two, and what others have in common with it."""

from megatron.export.hf.attention_settings import Rope, Window, groups
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Halves, QueryKeyValue, Weights
from megatron.export.hf.settings import Begin, Choice, Computed, Fixed, FixedKeys, Rule, Same, Table, refuse, same

SIZES = same(
    num_layers="num_hidden_layers",
    hidden_size="hidden_size",
    num_attention_heads="num_attention_heads",
    vocab_size="vocab_size",
    max_position_embeddings="max_position_embeddings",
)
FFN = Same("ffn_hidden_size", "intermediate_size")
HEAD_SIZE = Same("kv_channels", "head_dim", default=lambda c: c["hidden_size"] // c["num_attention_heads"])


def _save_divisible(settings: Table) -> dict[str, object]:
    size, heads = settings["hidden_size"], settings["num_attention_heads"]
    if size % heads:
        raise refuse("hidden_size", size, f"the family has multiples of num_attention_heads ({heads}) only")
    return {}


DIVISIBLE = Computed((), (), lambda config: {}, _save_divisible)
"""For families whose configuration in ``transformers`` rejects other hidden sizes, even with a ``head_dim``."""
NO_PADDING = Computed((), (), lambda config: {}, lambda settings: {"pad_token_id": None})
"""For families whose default is an id that a smaller vocabulary lacks: no model could be built."""
DROPOUT = (Same("attention_dropout", "attention_dropout", default=0.0), Begin({"hidden_dropout": 0.0}))
SILU_GATED = Choice("hidden_act", {"silu": {"swiglu": True}, "swish": {"swiglu": True}}, default="silu")
NO_BIASES = Fixed({"add_bias_linear": False})


def tied(default: bool) -> Choice:
    """Whether the output layer is the embedding."""
    options = {value: {"untie_embeddings_and_output_weights": not value} for value in (False, True)}
    return Choice("tie_word_embeddings", options, default)


UNTIED: tuple[Rule, ...] = (
    Fixed({"untie_embeddings_and_output_weights": True}), FixedKeys({"tie_word_embeddings": False}),
)  # fmt: skip
"""Rules of families whose class of ``transformers`` never ties the output layer."""


def rms_norm(default: float = 1e-6) -> tuple[Rule, ...]:
    """RMSNorm; ``default``: of its epsilon."""
    return Fixed({"normalization": "RMSNorm"}), Same("norm_epsilon", "rms_norm_eps", default=default)


def common(epsilon: float = 1e-6) -> tuple[Rule, ...]:
    """Settings that most families share."""
    return *SIZES, *rms_norm(epsilon), *DROPOUT, tied(False), SILU_GATED


ATTENTION: Weights = {
    "decoder.layers.*.input_layernorm": "model.layers.*.input_layernorm",
    "decoder.layers.*.self_attention.linear_qkv": QueryKeyValue(
        *(f"model.layers.*.self_attn.{letter}_proj" for letter in "qkv")
    ),
    "decoder.layers.*.self_attention.linear_proj": "model.layers.*.self_attn.o_proj",
    "decoder.layers.*.self_attention.q_layernorm": "model.layers.*.self_attn.q_norm",
    "decoder.layers.*.self_attention.k_layernorm": "model.layers.*.self_attn.k_norm",
    "decoder.layers.*.pre_mlp_layernorm": "model.layers.*.post_attention_layernorm",
}
FEED_FORWARD: Weights = {
    "decoder.layers.*.mlp.linear_fc1": Halves("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "decoder.layers.*.mlp.linear_fc2": "model.layers.*.mlp.down_proj",
}
EXPERTS: Weights = {
    "decoder.layers.*.mlp.router": "model.layers.*.mlp.gate",
    "decoder.layers.*.mlp.experts.linear_fc1": Halves(
        "model.layers.*.mlp.experts.*.gate_proj", "model.layers.*.mlp.experts.*.up_proj"
    ),
    "decoder.layers.*.mlp.experts.linear_fc2": "model.layers.*.mlp.experts.*.down_proj",
}
AROUND: Weights = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
WEIGHTS: Weights = {**AROUND, **ATTENTION, **FEED_FORWARD}
POST_NORMS: Weights = {
    **WEIGHTS,
    "decoder.layers.*.post_self_attention_layernorm": "model.layers.*.post_attention_layernorm",
    "decoder.layers.*.pre_mlp_layernorm": "model.layers.*.pre_feedforward_layernorm",
    "decoder.layers.*.post_mlp_layernorm": "model.layers.*.post_feedforward_layernorm",
}
"""Names for layers that also have norms after their branches."""

LLAMA = Family(
    "llama", "LlamaForCausalLM", models="LLaMA 1 to 3.3 and models of their shape",
    limits=("biases of attention only, or of the feed-forward network only",),
    config=(
        *common(), FFN, HEAD_SIZE, DIVISIBLE, groups(), Rope(),
        Same("add_bias_linear", "attention_bias", default=False), Same("add_bias_linear", "mlp_bias", default=False),
    ),
    weights=WEIGHTS,
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    models="Mistral 7B, Nemo",
    config=(*common(), FFN, HEAD_SIZE, groups(8), Rope(), NO_BIASES, Window(4096)),
    weights=WEIGHTS,
)
"""A sliding window."""

PHI3 = Family(
    "phi3", "Phi3ForCausalLM", models="Phi-3, Phi-4",
    config=(
        *SIZES, FFN, HEAD_SIZE, groups(), *rms_norm(1e-5), tied(False),
        SILU_GATED, NO_BIASES, Window(), Rope(share=1.0, kinds=("default", "longrope"), original=4096),
        Same("attention_dropout", "attention_dropout", default=0.0),
        Same("hidden_dropout", "resid_pdrop", default=0.0), Same("hidden_dropout", "embd_pdrop", default=0.0),
        NO_PADDING,
    ),
    weights={
        **AROUND, **ATTENTION,
        "decoder.layers.*.self_attention.linear_qkv": QueryKeyValue("model.layers.*.self_attn.qkv_proj"),
        "decoder.layers.*.mlp.linear_fc1": "model.layers.*.mlp.gate_up_proj",
        "decoder.layers.*.mlp.linear_fc2": "model.layers.*.mlp.down_proj",
    },
)  # fmt: skip
"""Also Phi-4: one matrix for queries, keys and values, one for both halves."""

QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", models="Qwen2, Qwen2.5",
    config=(
        *common(), FFN, HEAD_SIZE, groups(32), Rope(),
        Fixed({"add_bias_linear": False, "add_qkv_bias": True}), Window(4096, switch=True, first="max_window_layers"),
    ),
    weights=WEIGHTS,
)  # fmt: skip
"""Also Qwen2.5: biases of queries, keys and values."""

QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", models="Qwen3",
    config=(
        *common(), FFN, groups(32), Rope(), NO_BIASES,
        Fixed({"qk_layernorm": True}), FixedKeys({"attention_bias": False}),
        Same("kv_channels", "head_dim", default=128), Window(4096, switch=True, first="max_window_layers"),
    ),
    weights=WEIGHTS,
)  # fmt: skip
"""Normed queries and keys."""

OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", models="OLMo 2",
    config=(
        *SIZES, FFN, HEAD_SIZE, groups(), *rms_norm(1e-5), *DROPOUT, tied(False), SILU_GATED, NO_BIASES, Rope(),
        Fixed({"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True}),
        FixedKeys({"attention_bias": False}),
    ),
    weights=POST_NORMS,
)  # fmt: skip
"""Norms only after branches; queries and keys are normalized across heads."""
