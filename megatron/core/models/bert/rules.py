"""Rules that only BERT has."""

from __future__ import annotations

from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.models.bert.config import BertConfig, num_tokentypes
from megatron.core.models.common.masked_data import reads_text

WITHOUT_MASK = (
    "GPT2BPETokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
)
"""Tokenizer types that never have the tokens of BERT's samples."""


def pairs_have_two_types(cfg: Settings) -> Problems:
    """Reject --bert-num-tokentypes 1 with the binary head, whose samples have two types."""
    group = cfg.group(BertConfig)
    if group.bert_binary_head and num_tokentypes(group) < 2:
        yield problem(cfg, "bert_num_tokentypes", "is too small for pairs of texts", "2, or add --bert-no-binary-head")


def tokenizer_has_mask(cfg: Settings) -> Problems:
    """Reject tokenizer types without the tokens cls, sep and mask, unless data is generated."""
    if reads_text(cfg) and cfg.tokenizer.tokenizer_type in WITHOUT_MASK:
        reason = "has no cls, sep and mask tokens, which BERT samples need"
        yield problem(cfg, "tokenizer_type", reason, "for example BertWordPieceLowerCase with --vocab-file")
