"""Settings that the models of BERT and T5 reject. (Sentences and tokenizers of their data: ``masked_data.py``.)"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import Problems, problem

NOT_FOR_ENCODERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "num_moe_experts": ("is supported only by pretrain_gpt.py and pretrain_moe.py", "remove it"),
        "moe_use_upcycling": ("is supported only by pretrain_gpt.py and pretrain_moe.py", "remove it"),
        "mtp_num_layers": ("is supported only by pretrain_gpt.py", "remove it"),
        "multi_latent_attention": ("is supported only by pretrain_gpt.py, as causal attention", "remove it"),
        "reset_position_ids": ("has no effect: each sample holds one document", "remove it"),
        "reset_attention_mask": ("has no effect: each sample holds one document", "remove it"),
        "eod_mask_loss": ("has no effect: only masked tokens have a loss", "remove it"),
        "embedding_multiplier": ("is supported only by pretrain_gpt.py", "remove it"),
        "residual_multiplier": ("is supported only by pretrain_gpt.py", "remove it"),
        "logits_scaling": ("is supported only by pretrain_gpt.py", "remove it"),
        "spec": ("is supported only by pretrain_gpt.py", "remove it, or --spec local"),
        "use_rope_scaling": ("is supported only by pretrain_gpt.py", "use --position-embedding-type yarn"),
    }
)
"""Fields that only GPT has, why, and what to do."""

ALLOWED: Mapping[str, object] = MappingProxyType(
    {"spec": ["local"], "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
)


def gpt_only_settings(cfg: PretrainConfig) -> Problems:
    """For BERT and T5, reject each GPT-only flag in ``NOT_FOR_ENCODERS`` (experts, MTP, latent attention, document
    resets, multipliers, --spec, RoPE scaling) that is set to a value other than its neutral one. Checks nothing for
    GPT."""
    if cfg.model_family == "gpt":
        return
    for field, (reason, fix) in NOT_FOR_ENCODERS.items():
        value = getattr(cfg, field)
        if value and value != ALLOWED.get(field):
            yield problem(cfg, field, reason, fix)


def packed_sequences(cfg: PretrainConfig) -> Problems:
    """Reject --use-packed-sequence for models other than BERT (the fix for GPT names --reset-attention-mask), and for
    BERT with a nonzero --attention-dropout."""
    field = "use_packed_sequence"
    if not cfg.use_packed_sequence:
        return
    if cfg.model_family != "bert":
        fix = "use --reset-attention-mask to separate documents" if cfg.model_family == "gpt" else "remove it"
        yield problem(cfg, field, "is supported only by pretrain_bert.py", fix)
        return
    if cfg.attention_dropout:
        reason = "requires attention kernels for variable lengths, which have no dropout"
        yield problem(cfg, field, reason, "--attention-dropout 0")


def embedding_norm_settings(cfg: PretrainConfig) -> Problems:
    """Reject --embed-layernorm together with --norm-placement post, --use-parallel-residual or
    --apply-residual-connection-post-layernorm, one problem each."""
    if not cfg.embed_layernorm:
        return
    fix = "choose one of the two"
    if cfg.norm_placement == "post":
        reason = "contradicts --norm-placement post, which has no norm before the first layer"
        yield problem(cfg, "embed_layernorm", reason, fix)
    for field in ("use_parallel_residual", "apply_residual_connection_post_layernorm"):
        if getattr(cfg, field):
            yield problem(cfg, field, "contradicts --embed-layernorm", fix)
