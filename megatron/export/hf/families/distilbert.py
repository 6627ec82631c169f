"""DistilBERT (``DistilBertForMaskedLM``): BERT without kinds of tokens, pooler and head for the order of two texts."""

from megatron.export.hf.attention_settings import equal_heads
from megatron.export.hf.families import llama
from megatron.export.hf.families.bert import EXACT_GELU
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import QueryKeyValue
from megatron.export.hf.settings import Choice, Fixed, FixedKeys, Ignored, Same, same

LOCAL, LAYER = "encoder.layers.*", "distilbert.transformer.layer.*"

DISTILBERT = Family(
    "distilbert", "DistilBertForMaskedLM", models="DistilBERT",
    config=(
        *same(num_layers="n_layers", hidden_size="dim", num_attention_heads="n_heads", vocab_size="vocab_size",
              max_position_embeddings="max_position_embeddings", ffn_hidden_size="hidden_dim"),
        equal_heads("n_heads", "dim"), llama.tied(True), Choice("activation", EXACT_GELU.options, default="gelu"),
        Same("hidden_dropout", "dropout", default=0.1), Same("attention_dropout", "attention_dropout", default=0.1),
        Fixed({"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True,
              "norm_epsilon": 1e-12, "bert_binary_head": False, "apply_residual_connection_post_layernorm": True}),
        FixedKeys({"sinusoidal_pos_embds": False, "tie_weights_": True}),
        Ignored(("qa_dropout", "seq_classif_dropout", "output_past")),
    ),
    weights={
        "embedding.word_embeddings": "distilbert.embeddings.word_embeddings",
        "embedding.position_embeddings": "distilbert.embeddings.position_embeddings",
        f"{LOCAL}.self_attention.linear_qkv": QueryKeyValue(*(f"{LAYER}.attention.{letter}_lin" for letter in "qkv")),
        f"{LOCAL}.self_attention.linear_proj": f"{LAYER}.attention.out_lin",
        f"{LOCAL}.mlp.linear_fc1": f"{LAYER}.ffn.lin1",
        f"{LOCAL}.mlp.linear_fc2": f"{LAYER}.ffn.lin2",
        # a norm after a residual sum there is the norm before the next branch here
        "encoder.layers.0.input_layernorm": "distilbert.embeddings.LayerNorm",
        f"{LOCAL}.input_layernorm": "distilbert.transformer.layer.{before}.output_layer_norm",
        f"{LOCAL}.pre_mlp_layernorm": f"{LAYER}.sa_layer_norm",
        "encoder.final_layernorm": "distilbert.transformer.layer.{before}.output_layer_norm",
        "lm_head.dense": "vocab_transform",
        "lm_head.layer_norm": "vocab_layer_norm",
        "output_layer": "vocab_projector",
    },
    unused=(r"distilbert\.embeddings\.position_ids",),
    base="distilbert.", model_family="bert", also_read=("DistilBertModel",),
    heads=(("vocab_transform", "vocab_layer_norm", "vocab_projector"),),
)  # fmt: skip
