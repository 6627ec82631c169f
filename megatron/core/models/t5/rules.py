"""Rules that only T5 has."""

from __future__ import annotations

from megatron.core.config.errors import counted
from megatron.core.config.problems import Problems, Settings, flag_names, missing, problem
from megatron.core.config.tokenizer import WITHOUT_SENTINELS
from megatron.core.models.common.masked_data import reads_text
from megatron.core.models.t5.config import EncoderDecoderConfig

REFUSED = {
    "use_parallel_residual": "remove it",
    "embed_layernorm": "remove it",
    "window_attn_skip_freq": "remove it",
    "no_rope_freq": "remove it",
    "num_layers_per_virtual_pipeline_stage": "--num-virtual-stages-per-pipeline-rank",
}
"""Flags that are ambiguous for two stacks, each with its replacement."""

WITH_WORD_PIECES = ("BertWordPieceCase", "BertWordPieceLowerCase")
"""Tokenizer types that have exactly the requested sentinels."""
WITH_SENTINELS = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Tokenizer types whose files may contain sentinels."""
LONGEST_NGRAM = 10
"""Maximum number of words that are masked together."""


def decoder_length(cfg: Settings) -> Problems:
    """Require --decoder-seq-length, except for runs that neither train nor read data."""
    if cfg.group(EncoderDecoderConfig).decoder_seq_length is None and (cfg.needs_data or not cfg.validation.skip_train):
        yield missing(cfg, "decoder_seq_length")


def unsupported_settings(cfg: Settings) -> Problems:
    """Reject ``REFUSED`` flags, learnable softmax, and query groups that are no multiple of TP."""
    for field, fix in REFUSED.items():
        if getattr(cfg.flat, field):
            yield problem(cfg, field, "is not supported by pretrain_t5.py", fix)
    if cfg.model.softmax_type == "learnable":
        yield problem(cfg, "softmax_type", "is not supported by pretrain_t5.py", "choose vanilla or off-by-one")
    groups, tp = cfg.model.num_query_groups, cfg.model.tensor_model_parallel_size
    if groups and tp >= 1 and groups % tp:
        reason = f"is not a multiple of --tensor-model-parallel-size {tp}, which cross-attention requires"
        yield problem(cfg, "num_query_groups", reason)


def relative_position_buckets(cfg: Settings) -> Problems:
    """With --position-embedding-type relative, require an even --relative-attention-num-buckets and a
    --relative-attention-max-distance of more than half of it. Checks nothing otherwise."""
    if cfg.embeddings.position_embedding_type != "relative":
        return
    buckets, distance = (
        cfg.group(EncoderDecoderConfig).relative_attention_num_buckets,
        cfg.group(EncoderDecoderConfig).relative_attention_max_distance,
    )
    if buckets % 2:
        yield problem(cfg, "relative_attention_num_buckets", "is odd: half of the buckets are for keys after the query")
    if distance <= buckets // 2:
        reason = f"must be more than half of {flag_names(cfg, 'relative_attention_num_buckets')} {buckets}"
        yield problem(cfg, "relative_attention_max_distance", reason, f"at least {buckets // 2 + 1}")


def tokenizer_has_sentinels(cfg: Settings) -> Problems:
    """Reject tokenizer types in ``WITHOUT_SENTINELS`` for runs that read text; for others not in ``WITH_SENTINELS``
    require --vocab-extra-ids or --tokenizer-special-tokens."""
    if not reads_text(cfg) or cfg.tokenizer.tokenizer_type is None:
        return
    if cfg.tokenizer.tokenizer_type in WITHOUT_SENTINELS:
        reason = "does not support sentinels, which replace masked spans"
        yield problem(cfg, "tokenizer_type", reason, "for example BertWordPieceCase with --vocab-file")
        return
    has_some = cfg.tokenizer.tokenizer_type == "BertWordPieceCase" and cfg.tokenizer.vocab_extra_ids is None
    if not (
        has_some
        or cfg.tokenizer.vocab_extra_ids
        or cfg.tokenizer.tokenizer_special_tokens
        or cfg.tokenizer.tokenizer_type in WITH_SENTINELS
    ):
        reason = f"--tokenizer-type {cfg.tokenizer.tokenizer_type} has no sentinels, which replace masked spans"
        yield problem(cfg, "vocab_extra_ids", reason, "--vocab-extra-ids 100")


def decoder_holds_spans(cfg: Settings) -> Problems:
    """Require --decoder-seq-length to hold the expected masked tokens, a sentinel per span and a start token, and
    --vocab-extra-ids of WordPiece tokenizers to be at least the expected number of spans."""
    if not reads_text(cfg) or (cfg.data.seq_length or 0) < 4:
        return
    from megatron.data.word_masking import expected_masks  # here: --help does without numpy

    masked, spans = expected_masks(cfg.data.seq_length or 0, cfg.masked_data.mask_prob, LONGEST_NGRAM)
    length, extra, need = (
        cfg.group(EncoderDecoderConfig).decoder_seq_length,
        cfg.tokenizer.vocab_extra_ids,
        masked + spans + 1,
    )
    if length is not None and length < need:
        tokens, sentinels = counted(masked, "masked token"), counted(spans, "sentinel")
        reason = f"is less than about {tokens} of a sample, {sentinels} and a start token"
        yield problem(cfg, "decoder_seq_length", reason, f"at least {need}; or a smaller --mask-prob")
    fixed = cfg.tokenizer.tokenizer_type in WITH_WORD_PIECES and not cfg.tokenizer.tokenizer_special_tokens
    if fixed and extra and extra < spans:
        reason = f"is less than about {counted(spans, 'span')} of a sample"
        yield problem(cfg, "vocab_extra_ids", reason, str(max(100, spans)))
