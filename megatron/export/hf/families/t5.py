"""T5 1.0, 1.1 and Flan-T5 (``T5ForConditionalGeneration``): no softmax scale. 1.0 has ReLU and an output layer that is
the embedding, with the decoder's output scaled; 1.1: gated GELU and a separate output layer."""

from __future__ import annotations

from megatron.export.hf.attention_settings import equal_heads
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Halves, KeyValue, QueryKeyValue, Weights
from megatron.export.hf.settings import Choice, Computed, Fixed, Ignored, Same, Table, get, refuse, same


def _load_head(config: Table) -> dict[str, object]:
    """Version 5 of ``transformers`` says in the second key what the first one did before."""
    scaled = get(config, ("scale_decoder_outputs", "tie_word_embeddings"), True)
    return {"untie_embeddings_and_output_weights": not scaled, "scale_decoder_outputs": scaled}


def _save_head(settings: Table) -> dict[str, object]:
    scaled = settings["scale_decoder_outputs"]
    if scaled == settings["untie_embeddings_and_output_weights"]:
        raise refuse("scale_decoder_outputs", scaled, "a shared output layer is scaled and has no bias in transformers")
    return {"tie_word_embeddings": scaled, "scale_decoder_outputs": scaled}


HEAD = Computed(
    ("tie_word_embeddings", "scale_decoder_outputs"),
    ("untie_embeddings_and_output_weights", "scale_decoder_outputs"),
    _load_head,
    _save_head,
)
NO_GATE = {"relu": False, "geglu": False, "swiglu": False, "exact_gelu": False}
ACTIVATION = Choice(
    "feed_forward_proj", {"relu": {**NO_GATE, "relu": True}, "gated-gelu": {**NO_GATE, "geglu": True},
                          "gated-silu": {**NO_GATE, "swiglu": True}}, default="relu",
)  # fmt: skip


def _stack(stack: str, mlp: int) -> Weights:
    """``mlp``: index of the feed-forward network in a HF layer."""
    local_layer, hf_layer = f"{stack}.layers.*", f"{stack}.block.*.layer"
    attention, wide = f"{hf_layer}.0.SelfAttention", f"{hf_layer}.{mlp}.DenseReluDense"
    bias = "relative_attention_bias"
    return {
        f"{stack}_relative_pos_emb.{bias}": f"{stack}.block.0.layer.0.SelfAttention.{bias}",
        f"{local_layer}.input_layernorm": f"{hf_layer}.0.layer_norm",
        f"{local_layer}.self_attention.linear_qkv": QueryKeyValue(*(f"{attention}.{letter}" for letter in "qkv")),
        f"{local_layer}.self_attention.linear_proj": f"{attention}.o",
        f"{local_layer}.pre_mlp_layernorm": f"{hf_layer}.{mlp}.layer_norm",
        f"{local_layer}.mlp.linear_fc1": Halves(f"{wide}.wi_0", f"{wide}.wi_1", ungated=f"{wide}.wi"),
        f"{local_layer}.mlp.linear_fc2": f"{wide}.wo",
        f"{stack}.final_layernorm": f"{stack}.final_layer_norm",
    }


CROSS = "decoder.block.*.layer.1"
T5 = Family(
    "t5", "T5ForConditionalGeneration", models="T5 1.0, 1.1, Flan-T5",
    limits=("a shared output layer with a bias (Megatron-LM's default)",),
    config=(
        *same(hidden_size="d_model", num_attention_heads="num_heads", vocab_size="vocab_size", kv_channels="d_kv",
              ffn_hidden_size="d_ff", num_layers="num_layers"),
        Same("decoder_num_layers", "num_decoder_layers", default=lambda config: config["num_layers"]),
        equal_heads("num_heads"), HEAD,
        Same("max_position_embeddings", "n_positions", default=512),
        Same("relative_attention_num_buckets", "relative_attention_num_buckets", default=32),
        Same("relative_attention_max_distance", "relative_attention_max_distance", default=128),
        Same("norm_epsilon", "layer_norm_epsilon", default=1e-6),
        Same("hidden_dropout", "dropout_rate", default=0.1), ACTIVATION,
        Same("attention_dropout", "dropout_rate", default=0.1, written=False),
        Fixed({"position_embedding_type": "relative", "normalization": "RMSNorm", "add_bias_linear": False,
              "softmax_scale": 1.0}),
        Ignored(("is_encoder_decoder", "dense_act_fn", "is_gated_act", "classifier_dropout", "initializer_factor",
                 "output_past", "is_decoder")),
    ),
    weights={
        "embedding.word_embeddings": "shared", "output_layer": "lm_head", "lm_head.output_layer": "lm_head",
        **_stack("encoder", 1), **_stack("decoder", 2),
        "decoder.layers.*.pre_cross_attn_layernorm": f"{CROSS}.layer_norm",
        "decoder.layers.*.cross_attention.linear_q": f"{CROSS}.EncDecAttention.q",
        "decoder.layers.*.cross_attention.linear_kv":
            KeyValue(f"{CROSS}.EncDecAttention.k", f"{CROSS}.EncDecAttention.v"),
        "decoder.layers.*.cross_attention.linear_proj": f"{CROSS}.EncDecAttention.o",
    },
    unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    base="", model_family="t5", stand_ins={"lm_head.weight": "shared.weight"},
    aliases={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
)  # fmt: skip
