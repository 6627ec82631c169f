"""BERT (``BertForPreTraining``): every norm stands behind a residual sum, so ours before a branch is theirs behind the
one before it, and what is added to is the normed stream (--apply-residual-connection-post-layernorm).

Files of ``BertForMaskedLM`` may lack the head for the order of two pieces of text, which then begins at random values.
"""

from megatron.core.export.hf.attention_settings import equal_heads
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import QueryKeyValue, Weights
from megatron.core.export.hf.settings import Choice, Ignored, Ours, Rule, Same, Theirs

OURS, LAYER = "encoder.layers.*", "bert.encoder.layer.*"
EXACT_GELU = Choice(
    "hidden_act", {"gelu": {"bias_gelu_fusion": False, "exact_gelu": False},
                   "gelu_python": {"bias_gelu_fusion": True, "exact_gelu": True}}, default="gelu",
)  # fmt: skip
"""By the error function, as their one key is of the head too, where ours is exact always."""
COMMON: tuple[Rule, ...] = (
    *llama.SIZES, llama.FFN, equal_heads("hidden_size", "num_attention_heads"), llama.tied(True), EXACT_GELU,
    Same("norm_epsilon", "layer_norm_eps", default=1e-12), Same("hidden_dropout", "hidden_dropout_prob", default=0.1),
    Same("attention_dropout", "attention_probs_dropout_prob", default=0.1),
    Ours({"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True,
          "bert_binary_head": True}),
    Theirs({"type_vocab_size": 2, "position_embedding_type": "absolute"}), Ignored(("classifier_dropout",)),
)  # fmt: skip
WEIGHTS: Weights = {
    **{f"embedding.{each}_embeddings": f"bert.embeddings.{theirs}_embeddings"
       for each, theirs in (("word", "word"), ("position", "position"), ("tokentype", "token_type"))},
    f"{OURS}.self_attention.linear_qkv":
        QueryKeyValue(*(f"{LAYER}.attention.self.{each}" for each in ("query", "key", "value"))),
    f"{OURS}.self_attention.linear_proj": f"{LAYER}.attention.output.dense",
    f"{OURS}.mlp.linear_fc1": f"{LAYER}.intermediate.dense",
    f"{OURS}.mlp.linear_fc2": f"{LAYER}.output.dense",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "output_layer": "cls.predictions.decoder",
    "output_layer.bias": "cls.predictions.bias",
    "pooler.dense": "bert.pooler.dense",
    "binary_head": "cls.seq_relationship",
}  # fmt: skip
POST_NORMS: Weights = {
    "encoder.layers.0.input_layernorm": "bert.embeddings.LayerNorm",
    f"{OURS}.input_layernorm": "bert.encoder.layer.{before}.output.LayerNorm",
    f"{OURS}.pre_mlp_layernorm": f"{LAYER}.attention.output.LayerNorm",
    "encoder.final_layernorm": "bert.encoder.layer.{before}.output.LayerNorm",
}
OLD_NAMES = {
    "LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}  # fmt: skip

FAMILY = Family(
    "bert", "BertForPreTraining",
    config=(*COMMON, Ours({"apply_residual_connection_post_layernorm": True})),
    weights={**WEIGHTS, **POST_NORMS},
    unused=(r"bert\.embeddings\.position_ids",),
    base="bert.", model_family="bert", also_read=("BertForMaskedLM",), aliases=OLD_NAMES,
    optional=("bert.pooler.dense", "cls.seq_relationship"),
)  # fmt: skip
