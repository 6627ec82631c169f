"""Rules about models of an encoder and a decoder, and about settings that only these have."""

from __future__ import annotations

from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import Problems, flag_names, missing, problem


def decoder_settings_need_t5(cfg: PretrainConfig) -> Problems:
    """For models other than T5, reject --decoder-num-layers, --decoder-seq-length, --scale-decoder-outputs and
    --position-embedding-type relative, one problem each."""
    if cfg.model_family == "t5":
        return
    for field in ("decoder_num_layers", "decoder_seq_length"):
        if getattr(cfg, field) is not None:
            yield problem(cfg, field, "requires pretrain_t5.py", "remove it")
    if cfg.scale_decoder_outputs:
        yield problem(cfg, "scale_decoder_outputs", "requires pretrain_t5.py", "remove it")
    if cfg.position_embedding_type == "relative":
        fix = "--position-embedding-type rope"
        yield problem(cfg, "position_embedding_type", "requires pretrain_t5.py", fix)


def encoder_num_layers_agrees(cfg: PretrainConfig) -> Problems:
    if cfg.num_layers is not None and cfg.encoder_num_layers != cfg.num_layers:
        yield problem(cfg, "encoder_num_layers", f"contradicts --num-layers {cfg.num_layers}", "give one of the two")


def t5_decoder_length(cfg: PretrainConfig) -> Problems:
    if cfg.model_family == "t5" and cfg.decoder_seq_length is None and (cfg.needs_data or not cfg.skip_train):
        yield missing("decoder_seq_length")


def t5_scaled_output(cfg: PretrainConfig) -> Problems:
    if cfg.model_family == "t5" and cfg.scale_decoder_outputs and cfg.untie_embeddings_and_output_weights:
        reason = "contradicts --untie-embeddings-and-output-weights: T5 1.0 scales only a shared output layer"
        yield problem(cfg, "scale_decoder_outputs", reason, "remove one")


REFUSED = {
    "use_parallel_residual": "remove it",
    "embed_layernorm": "remove it",
    "window_attn_skip_freq": "remove it",
    "no_rope_freq": "remove it",
    "num_layers_per_virtual_pipeline_stage": "--num-virtual-stages-per-pipeline-rank",
}
"""Flags that are ambiguous for two stacks, each with its replacement."""


def t5_unsupported_settings(cfg: PretrainConfig) -> Problems:
    """For T5 only, reject the flags in ``REFUSED`` (parallel residual, embedding LayerNorm, attention and RoPE layer
    patterns, layers per virtual stage), ``--softmax-type learnable``, and --num-query-groups that is no multiple of the
    tensor-parallel size."""
    if cfg.model_family != "t5":
        return
    for field, fix in REFUSED.items():
        if getattr(cfg, field):
            yield problem(cfg, field, "is not supported by pretrain_t5.py", fix)
    if cfg.softmax_type == "learnable":
        yield problem(cfg, "softmax_type", "is not supported by pretrain_t5.py", "choose vanilla or off-by-one")
    groups, tp = cfg.num_query_groups, cfg.tensor_model_parallel_size
    if groups and tp >= 1 and groups % tp:
        reason = f"is not a multiple of --tensor-model-parallel-size {tp}, which cross-attention requires"
        yield problem(cfg, "num_query_groups", reason)


def relative_position_buckets(cfg: PretrainConfig) -> Problems:
    """For T5 with --position-embedding-type relative, require an even --relative-attention-num-buckets and a
    --relative-attention-max-distance of more than half of it. Checks nothing otherwise."""
    if cfg.position_embedding_type != "relative" or cfg.model_family != "t5":
        return
    buckets, distance = cfg.relative_attention_num_buckets, cfg.relative_attention_max_distance
    if buckets % 2:
        yield problem(cfg, "relative_attention_num_buckets", "is odd: half of the buckets are for keys after the query")
    if distance <= buckets // 2:
        reason = f"must be more than half of {flag_names('relative_attention_num_buckets')} {buckets}"
        yield problem(cfg, "relative_attention_max_distance", reason, f"at least {buckets // 2 + 1}")
