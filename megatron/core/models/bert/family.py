"""BERT as a model family."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megatron.core.config.optional import MaskedDataConfig, PackedSamplesConfig
from megatron.core.config.problems import Settings, collect_rules
from megatron.core.models.bert import description, rules
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.common.masked_data import maskable_tokens, masking_options, sinks_exclude_cuda_graphs
from megatron.core.models.family import DataSet, ModelFamily, Options, Program

if TYPE_CHECKING:
    from torch import Tensor, nn


def data_set(cfg: Settings, options: Options) -> DataSet:
    """Return (class, configuration) of the masked data set: full words, at most 3 together, and pairs of texts unless
    --bert-no-binary-head is set. ``options`` are the common options. Reads no data."""
    from megatron.core.datasets import bert_dataset  # imports numpy

    masking = {**masking_options(cfg, longest_ngram=3), "classification_head": cfg.group(BertConfig).bert_binary_head}
    config = bert_dataset.BERTMaskedWordPieceDatasetConfig(**options, **masking)
    return bert_dataset.BERTMaskedWordPieceDataset, config


def logits(model: nn.Module, cfg: Settings, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, v] for ``tokens`` [b, s] of the first type; models without types ignore it."""
    return model(tokens, None, tokens.new_zeros(tokens.shape))[0]


FAMILY = ModelFamily(
    name="bert",
    programs=(Program("bert", "BERT"),),
    task="megatron.training.tasks.bert:BertTask",
    data_set=data_set,
    describe=description.describe_settings,
    transformers=lambda cfg: {"encoder": cfg.model},
    groups=(BertConfig, PackedSamplesConfig, MaskedDataConfig),
    rules=(*collect_rules(rules), partial(maskable_tokens, special=3), sinks_exclude_cuda_graphs),  # cls, sep, sep
    tokenizer_type="BertWordPieceLowerCase",
    sequence_tensors=frozenset({"text", "types", "labels", "loss_mask", "position_ids", "document"}),
    weight_settings=description.SETTINGS_OF_HEADS,
    is_causal=False,
    tool="tools/fill_mask.py",
    logits=logits,
    auto_model="AutoModelForMaskedLM",
)
