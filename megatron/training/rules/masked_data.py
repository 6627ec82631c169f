"""Rules about the data of BERT and T5: tokenizers and lengths of samples, as far as flags tell. What the files and the
tokenizer itself say is refused where data sets are built (``core/datasets/masked_dataset.py``)."""

from __future__ import annotations

from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import Problems, problem

WITHOUT_MASK = ("GPT2BPETokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "NullTokenizer",
                "ByteLevelTokenizer")  # fmt: skip
"""Kinds that never have the tokens of BERT's samples."""

WITHOUT_SENTINELS = ("TikTokenizer", "NullTokenizer", "ByteLevelTokenizer")
"""Kinds to which no sentinels can be added."""

OWN_SENTINELS = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Kinds whose files may bring some."""


def berts_tokenizer_has_a_mask(cfg: PretrainConfig) -> Problems:
    if cfg.model_family == "bert" and not cfg.mock_data and cfg.tokenizer_type in WITHOUT_MASK:
        reason = "has no tokens for cls, sep and mask, with which samples are made"
        yield problem(cfg, "tokenizer_type", reason, "BertWordPieceLowerCase with --vocab-file, for example")


def t5s_tokenizer_has_sentinels(cfg: PretrainConfig) -> Problems:
    if cfg.model_family != "t5" or cfg.mock_data or cfg.tokenizer_type is None:
        return
    if cfg.tokenizer_type in WITHOUT_SENTINELS:
        reason = "takes no sentinels, which stand for masked spans"
        yield problem(cfg, "tokenizer_type", reason, "BertWordPieceCase with --vocab-file, for example")
        return
    has_some = cfg.tokenizer_type == "BertWordPieceCase" and cfg.vocab_extra_ids is None
    if not (has_some or cfg.vocab_extra_ids or cfg.tokenizer_special_tokens or cfg.tokenizer_type in OWN_SENTINELS):
        reason = f"--tokenizer-type {cfg.tokenizer_type} has no sentinels, which stand for masked spans"
        yield problem(cfg, "vocab_extra_ids", reason, "--vocab-extra-ids 100")


def a_sample_has_room(cfg: PretrainConfig) -> Problems:
    if cfg.model_family == "bert" and not cfg.mock_data and cfg.seq_length is not None and cfg.seq_length < 5:
        yield problem(cfg, "seq_length", "cls, two seps and a pair take 5 tokens", "at least 5")
