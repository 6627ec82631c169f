"""Megatron-LM's BERT (``MegatronBertForPreTraining``): BERT with norms before its branches and one behind the last."""

from megatron.core.export.hf.families import bert
from megatron.core.export.hf.family import Family

FAMILY = Family(
    "megatron-bert", "MegatronBertForPreTraining",
    config=(*bert.COMMON, bert.has_pairs("MegatronBertForMaskedLM")),
    weights={
        **bert.WEIGHTS,
        f"{bert.OURS}.input_layernorm": f"{bert.LAYER}.attention.ln",
        f"{bert.OURS}.pre_mlp_layernorm": f"{bert.LAYER}.ln",
        "encoder.final_layernorm": "bert.encoder.ln",
    },
    unused=bert.FAMILY.unused,
    base="bert.", model_family="bert", also_read=("MegatronBertForMaskedLM",), aliases=bert.OLD_NAMES,
    optional=bert.FAMILY.optional, blank=bert.one_kind_of_token,
)  # fmt: skip
