"""RoBERTa (``roberta``) and XLM-RoBERTa (``xlm-roberta``): BERT without pairs of texts, whose first position is the
row of the position table after the row of the padding id."""

from __future__ import annotations

from dataclasses import replace

from megatron.export.hf.families import bert
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Weights
from megatron.export.hf.settings import Computed, Fixed, Same, Table, get, refuse


def _load_positions(config: Table) -> dict[str, object]:
    """The rows of the table before the first position are padding id + 1."""
    offset = get(config, ("pad_token_id",), 1) + 1
    rows = get(config, ("max_position_embeddings",))
    return {"learned_position_offset": offset, "max_position_embeddings": rows - offset}


def _save_positions(settings: Table) -> dict[str, object]:
    offset = settings["learned_position_offset"]
    if offset == 0:
        raise refuse("learned_position_offset", offset, "the family has the row of its padding id before the first one")
    return {"pad_token_id": offset - 1, "max_position_embeddings": settings["max_position_embeddings"] + offset}


POSITIONS = Computed(
    ("max_position_embeddings", "pad_token_id"),
    ("max_position_embeddings", "learned_position_offset"),
    _load_positions,
    _save_positions,
)
WEIGHTS: Weights = {
    **bert.encoder("roberta"),
    **bert.post_norms("roberta"),
    "lm_head.dense": "lm_head.dense",
    "lm_head.layer_norm": "lm_head.layer_norm",
    "output_layer": "lm_head.decoder",
    "output_layer.bias": "lm_head.bias",
}

ROBERTA = Family(
    "roberta", "RobertaForMaskedLM", models="RoBERTa",
    limits=("models that decode",),
    config=(
        *(rule for rule in bert.COMMON if rule.settings != ("max_position_embeddings",)), POSITIONS,
        Same("bert_num_tokentypes", "type_vocab_size", default=2),
        Fixed({"bert_binary_head": False, "apply_residual_connection_post_layernorm": True}),
    ),
    weights=WEIGHTS,
    unused=(r"roberta\.embeddings\.position_ids", r"roberta\.pooler\..*"),
    base="roberta.", model_family="bert", also_read=("RobertaModel",), aliases={"lm_head.decoder.bias": "lm_head.bias"},
    heads=(("lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),),
)  # fmt: skip
XLM_ROBERTA = replace(
    ROBERTA,
    model_type="xlm-roberta",
    architecture="XLMRobertaForMaskedLM",
    models="XLM-RoBERTa",
    also_read=("XLMRobertaModel",),
)
