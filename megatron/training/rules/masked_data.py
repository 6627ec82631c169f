"""Rules about the data of BERT and T5: tokenizers and lengths of samples, as far as flags tell. What the files and the
tokenizer themselves say: ``inputs.py``."""

from __future__ import annotations

import math

from megatron.core.config.errors import counted
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import Problems, problem

WITHOUT_MASK = ("GPT2BPETokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "NullTokenizer",
                "ByteLevelTokenizer")  # fmt: skip
"""Kinds that never have the tokens of BERT's samples."""

WITHOUT_SENTINELS = ("TikTokenizer", "NullTokenizer", "ByteLevelTokenizer")
"""Kinds to which no sentinels can be added."""

WITH_WORD_PIECES = ("BertWordPieceCase", "BertWordPieceLowerCase")
"""Kinds that have the sentinels that are asked for, and no others."""

OWN_SENTINELS = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Kinds whose files may bring some."""


def bert_tokenizer_has_mask(cfg: PretrainConfig) -> Problems:
    if cfg.model_family == "bert" and not cfg.mock_data and cfg.tokenizer_type in WITHOUT_MASK:
        reason = "has no cls, sep and mask tokens, which BERT samples need"
        yield problem(cfg, "tokenizer_type", reason, "for example BertWordPieceLowerCase with --vocab-file")


def tokenizer_supports_sentinels(cfg: PretrainConfig) -> Problems:
    if cfg.vocab_extra_ids and cfg.tokenizer_type in WITHOUT_SENTINELS:
        reason = f"--tokenizer-type {cfg.tokenizer_type} does not support sentinels"
        yield problem(cfg, "vocab_extra_ids", reason, "remove it")


def t5_tokenizer_has_sentinels(cfg: PretrainConfig) -> Problems:
    """For T5 without --mock-data, reject tokenizer types that accept no sentinel tokens. For other types that may bring
    none (not in ``OWN_SENTINELS``), require --vocab-extra-ids or --tokenizer-special-tokens; BertWordPieceCase may also
    leave --vocab-extra-ids unset."""
    if cfg.model_family != "t5" or cfg.mock_data or cfg.tokenizer_type is None:
        return
    if cfg.tokenizer_type in WITHOUT_SENTINELS:
        reason = "does not support sentinels, which replace masked spans"
        yield problem(cfg, "tokenizer_type", reason, "for example BertWordPieceCase with --vocab-file")
        return
    has_some = cfg.tokenizer_type == "BertWordPieceCase" and cfg.vocab_extra_ids is None
    if not (has_some or cfg.vocab_extra_ids or cfg.tokenizer_special_tokens or cfg.tokenizer_type in OWN_SENTINELS):
        reason = f"--tokenizer-type {cfg.tokenizer_type} has no sentinels, which replace masked spans"
        yield problem(cfg, "vocab_extra_ids", reason, "--vocab-extra-ids 100")


PLACES = {"bert": 3, "t5": 2}
"""Tokens of a sample that no word may take."""


def samples_have_maskable_tokens(cfg: PretrainConfig) -> Problems:
    """For BERT and T5 without --mock-data, require --seq-length to leave at least 2 tokens besides the special ones (3
    in BERT, 2 in T5). If it does, require --mask-prob times these tokens to be at least 1."""
    places = PLACES.get(cfg.model_family)
    if places is None or cfg.mock_data or cfg.seq_length is None:
        return
    words = cfg.seq_length - places
    if words < 2:
        reason = f"leaves {counted(max(words, 0), 'token')} for text, because {places} tokens are special"
        yield problem(cfg, "seq_length", reason, f"at least {places + 2}")
    elif cfg.mask_prob * words < 1:
        fix = f"at least {math.ceil(1000 / words) / 1000:g}"
        yield problem(cfg, "mask_prob", f"masks none of the {words} tokens of a sample", fix)


def t5_decoder_holds_spans(cfg: PretrainConfig) -> Problems:
    """For T5 without --mock-data, require --decoder-seq-length to hold the expected masked tokens, one sentinel per
    span and a start token. For WordPiece tokenizers without --tokenizer-special-tokens, require --vocab-extra-ids, if
    set, to be at least the expected number of spans."""
    if cfg.model_family != "t5" or cfg.mock_data or (cfg.seq_length or 0) < 4:
        return
    from megatron.data.word_masking import LONGEST_NGRAM, expected_masks  # here: --help does without numpy

    masked, spans = expected_masks(cfg.seq_length or 0, cfg.mask_prob, LONGEST_NGRAM["t5"])
    given, extra, need = cfg.decoder_seq_length, cfg.vocab_extra_ids, masked + spans + 1
    if given is not None and given < need:
        tokens, sentinels = counted(masked, "masked token"), counted(spans, "sentinel")
        reason = f"is less than about {tokens} of a sample, {sentinels} and a start token"
        yield problem(cfg, "decoder_seq_length", reason, f"at least {need}; or a smaller --mask-prob")
    fixed = cfg.tokenizer_type in WITH_WORD_PIECES and not cfg.tokenizer_special_tokens
    if fixed and extra and extra < spans:
        reason = f"is less than about {counted(spans, 'span')} of a sample"
        yield problem(cfg, "vocab_extra_ids", reason, str(max(100, spans)))
