"""GPT-2, and GPT-NeoX with Pythia."""

from megatron.export.hf.attention_settings import Rope, equal_heads
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import QueryKeyValue, TensorLayout
from megatron.export.hf.settings import Choice, Computed, Fixed, FixedKeys, Ignored, Rule, Same, Table, same

GELU = {
    "gelu_new": {"bias_gelu_fusion": True},
    "gelu_pytorch_tanh": {"bias_gelu_fusion": True},
    "gelu_fast": {"bias_gelu_fusion": True},
    "gelu": {"bias_gelu_fusion": False},
}
"""Activations of layers with biases: the fused form is the tanh approximation."""

RELU = {"relu": {"relu": True}}


def activation(key: str, default: str, relu: bool = False) -> Computed:
    """Return the rule of the activation ``key`` of a network with optional biases: without them GELU is exact here,
    whatever its fusion. ``relu``: the family also has ReLU."""
    options = {**GELU, **(RELU if relu else {})}
    choice = Choice(key, {name: {"relu": False, **option} for name, option in options.items()}, default)

    def save(settings: Table) -> dict[str, object]:
        is_plain = not settings["add_bias_linear"]
        return choice.save({**settings, "bias_gelu_fusion": False} if is_plain else settings)

    return Computed((key,), ("relu", "bias_gelu_fusion"), choice.load, save, choice.limits)


SIZES: tuple[Rule, ...] = (
    *same(num_layers="n_layer", hidden_size="n_embd", num_attention_heads="n_head", vocab_size="vocab_size",
          max_position_embeddings="n_positions"),
    Same("ffn_hidden_size", "n_inner", default=lambda config: 4 * config["n_embd"]),
    Same("norm_epsilon", "layer_norm_epsilon", default=1e-5), llama.tied(True),
    Fixed({"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True}),
    Same("attention_dropout", "attn_pdrop", default=0.1),
    Same("hidden_dropout", "resid_pdrop", default=0.1), Same("hidden_dropout", "embd_pdrop", default=0.1),
)  # fmt: skip
"""Rules of models with GPT-2's names."""
GPT2 = Family(
    "gpt2", "GPT2LMHeadModel", models="GPT-2 and models of its shape",
    config=(
        *SIZES, equal_heads("n_head", "n_embd"), Choice("activation_function", GELU, default="gelu_new"),
        FixedKeys({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}),
        Ignored(("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
                 "summary_proj_to_labels", "summary_first_dropout")),
    ),
    weights={
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.layers.*.input_layernorm": "transformer.h.*.ln_1",
        "decoder.layers.*.self_attention.linear_qkv": QueryKeyValue("transformer.h.*.attn.c_attn", transposed=True),
        "decoder.layers.*.self_attention.linear_proj": TensorLayout("transformer.h.*.attn.c_proj", transposed=True),
        "decoder.layers.*.pre_mlp_layernorm": "transformer.h.*.ln_2",
        "decoder.layers.*.mlp.linear_fc1": TensorLayout("transformer.h.*.mlp.c_fc", transposed=True),
        "decoder.layers.*.mlp.linear_fc2": TensorLayout("transformer.h.*.mlp.c_proj", transposed=True),
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    },
    unused=(r".*\.attn\.(masked_)?bias",),
    base="transformer.",
)  # fmt: skip
"""Learned positions, matrices [in, out]."""

GPT_NEOX = Family(
    "gpt_neox", "GPTNeoXForCausalLM", models="GPT-NeoX-20B, Pythia",
    config=(
        *llama.SIZES, llama.FFN, Same("norm_epsilon", "layer_norm_eps", default=1e-5),
        equal_heads("num_attention_heads", "hidden_size"), llama.tied(False),
        Choice("hidden_act", GELU, default="gelu"),
        Rope(base_key="rotary_emb_base", share=0.25, share_key="rotary_pct"),
        Fixed({"normalization": "LayerNorm", "add_bias_linear": True}),
        Same("use_parallel_residual", "use_parallel_residual", default=True), FixedKeys({"attention_bias": True}),
        Same("attention_dropout", "attention_dropout", default=0.0),
        Same("hidden_dropout", "hidden_dropout", default=0.0),
        Ignored(("classifier_dropout", "is_decoder")),
    ),
    weights={
        "embedding.word_embeddings": "gpt_neox.embed_in",
        "decoder.layers.*.input_layernorm": "gpt_neox.layers.*.input_layernorm",
        "decoder.layers.*.self_attention.linear_qkv": "gpt_neox.layers.*.attention.query_key_value",
        "decoder.layers.*.self_attention.linear_proj": "gpt_neox.layers.*.attention.dense",
        "decoder.layers.*.pre_mlp_layernorm": "gpt_neox.layers.*.post_attention_layernorm",
        "decoder.layers.*.mlp.linear_fc1": "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "decoder.layers.*.mlp.linear_fc2": "gpt_neox.layers.*.mlp.dense_4h_to_h",
        "decoder.final_layernorm": "gpt_neox.final_layer_norm",
        "output_layer": "embed_out",
    },
    unused=(r".*\.attention\.(masked_)?bias", r".*\.rotary_emb\.inv_freq"),
    base="gpt_neox.",
    modules={"embed_out": "lm_head"},
)  # fmt: skip
"""Query, key and value rows of one head are adjacent, in both formats."""
