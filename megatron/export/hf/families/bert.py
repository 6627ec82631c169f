"""BERT (``BertForPreTraining``): every norm follows a residual sum. So the local norm before a branch is the HF
norm after the previous branch, and the normed stream is the residual (--apply-residual-connection-post-layernorm).

Folders may lack heads: ``BertModel`` the masked-language-model head and the head for the order of two texts, and the
pooler without ``add_pooling_layer``. Omitted heads begin at random values. A model trained without the order of texts
is exported as ``BertForMaskedLM`` with a single token type, whose embedding is zero."""

from dataclasses import replace

from megatron.export.hf.attention_settings import equal_heads
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import QueryKeyValue, Weights
from megatron.export.hf.settings import Choice, Computed, Fixed, FixedKeys, Ignored, Rule, Same, Table, get, refuse

LOCAL = "encoder.layers.*"
EXACT_GELU = Choice(
    "hidden_act",
    {
        "gelu": {"bias_gelu_fusion": False, "exact_gelu": False},
        "gelu_python": {"bias_gelu_fusion": True, "exact_gelu": True},
    },
    default="gelu",
)
"""GELU with the error function: the HF setting also applies to the head, which always uses the exact GELU here."""


def has_pairs(masked: str) -> Computed:
    """Rule of ``type_vocab_size`` 2 (pairs of texts) and ``bert_binary_head``; 1: the architecture ``masked``."""

    def load(config: Table) -> dict[str, object]:
        if (kinds := get(config, ("type_vocab_size",), 2)) not in (1, 2):
            raise refuse("type_vocab_size", kinds, "which cannot be represented: only 1 and 2 can")
        return {"bert_binary_head": kinds == 2}

    def save(settings: Table) -> dict[str, object]:
        pairs = settings["bert_binary_head"]
        return {"type_vocab_size": 2} if pairs else {"type_vocab_size": 1, "architectures": [masked]}

    return Computed(("type_vocab_size",), ("bert_binary_head",), load, save)


def one_token_type(settings: Table) -> dict[str, tuple[int, ...]]:
    """The embedding that a model without pairs lacks."""
    if settings["bert_binary_head"]:
        return {}
    return {"bert.embeddings.token_type_embeddings.weight": (1, settings["hidden_size"])}


COMMON: tuple[Rule, ...] = (
    *llama.SIZES, llama.FFN, equal_heads("num_attention_heads", "hidden_size"), llama.tied(True), EXACT_GELU,
    Same("norm_epsilon", "layer_norm_eps", default=1e-12), Same("hidden_dropout", "hidden_dropout_prob", default=0.1),
    Same("attention_dropout", "attention_probs_dropout_prob", default=0.1),
    Fixed({"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True}),
    FixedKeys({"position_embedding_type": "absolute"}), Ignored(("classifier_dropout",)),
)  # fmt: skip


def encoder(base: str) -> Weights:
    """Return {our name: HF name or layout} of embeddings and layers without norms; ``base``: prefix of HF names."""
    layer = f"{base}.encoder.layer.*"
    return {
        "embedding.word_embeddings": f"{base}.embeddings.word_embeddings",
        "embedding.position_embeddings": f"{base}.embeddings.position_embeddings",
        "embedding.tokentype_embeddings": f"{base}.embeddings.token_type_embeddings",
        f"{LOCAL}.self_attention.linear_qkv": QueryKeyValue(
            *(f"{layer}.attention.self.{part}" for part in ("query", "key", "value"))
        ),
        f"{LOCAL}.self_attention.linear_proj": f"{layer}.attention.output.dense",
        f"{LOCAL}.mlp.linear_fc1": f"{layer}.intermediate.dense",
        f"{LOCAL}.mlp.linear_fc2": f"{layer}.output.dense",
    }


def post_norms(base: str) -> Weights:
    """Return {our name: HF name} of norms that follow residual sums; ``base``: prefix of HF names."""
    output = f"{base}.encoder.layer.{{before}}.output.LayerNorm"
    return {
        "encoder.layers.0.input_layernorm": f"{base}.embeddings.LayerNorm",
        f"{LOCAL}.input_layernorm": output,
        f"{LOCAL}.pre_mlp_layernorm": f"{base}.encoder.layer.*.attention.output.LayerNorm",
        "encoder.final_layernorm": output,
    }


WEIGHTS: Weights = {
    **encoder("bert"),
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "output_layer": "cls.predictions.decoder",
    "output_layer.bias": "cls.predictions.bias",
    "pooler.dense": "bert.pooler.dense",
    "binary_head": "cls.seq_relationship",
}
OLD_NAMES = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

_HEAD = "cls.predictions"
PREDICTIONS = (_HEAD, f"{_HEAD}.transform.dense", f"{_HEAD}.transform.LayerNorm", f"{_HEAD}.decoder")
HEADS = (("bert.pooler.dense",), ("cls.seq_relationship",), PREDICTIONS)

BERT = Family(
    "bert", "BertForPreTraining", models="BERT",
    limits=("models that decode",),
    config=(*COMMON, has_pairs("BertForMaskedLM"), Fixed({"apply_residual_connection_post_layernorm": True})),
    weights={**WEIGHTS, **post_norms("bert")},
    unused=(r"bert\.embeddings\.position_ids",),
    base="bert.", model_family="bert", also_read=("BertForMaskedLM", "BertModel", "BertForNextSentencePrediction"),
    aliases=OLD_NAMES, heads=HEADS, blank=one_token_type,
)  # fmt: skip
MEGATRON_BERT = replace(
    BERT,
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    models="Megatron-LM's BERT",
    config=(*COMMON, has_pairs("MegatronBertForMaskedLM")),
    also_read=("MegatronBertForMaskedLM", "MegatronBertModel", "MegatronBertForNextSentencePrediction"),
    weights={
        **WEIGHTS,
        f"{LOCAL}.input_layernorm": "bert.encoder.layer.*.attention.ln",
        f"{LOCAL}.pre_mlp_layernorm": "bert.encoder.layer.*.ln",
        "encoder.final_layernorm": "bert.encoder.ln",
    },
)
"""Megatron-LM's: norms before its branches and one after the last."""
