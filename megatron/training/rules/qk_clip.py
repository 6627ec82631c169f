"""Rules of --qk-clip and --log-max-attention-logit."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.problems import Problems, problem
from megatron.training.config.pretrain_config import PretrainConfig


def _missing_logits(cfg: PretrainConfig) -> Iterator[tuple[str, str]]:
    """Yield (reason, fix) for kernels of another library, CUDA graphs, and a bias of logits."""
    model = cfg.model
    if model.transformer_impl == "transformer_engine":
        reason = "is not supported by --transformer-impl transformer_engine, which gives no logits"
        yield reason, "use --transformer-impl local"
    if cfg.training.cuda_graph_impl == "local":
        yield "is not supported with --cuda-graph-impl local", "remove one"
    if cfg.embeddings.position_embedding_type == "relative":
        yield "is not supported with --position-embedding-type relative, which adds a bias to logits", "remove it"


def gives_logits(cfg: PretrainConfig) -> bool:
    """Whether maximum attention logits can be measured."""
    return not any(_missing_logits(cfg))


def maximum_logits_are_available(cfg: PretrainConfig) -> Problems:
    """Reject both flags where maximum logits are not available."""
    field = "qk_clip" if cfg.model.qk_clip else "log_max_attention_logit"
    if getattr(cfg.model, field):
        for reason, fix in _missing_logits(cfg):
            yield problem(cfg, field, reason, fix)


def clipped_logits_depend_on_weights(cfg: PretrainConfig) -> Problems:
    """Reject --qk-clip where scaling the weights does not scale the logits, and with shared keys over TP ranks."""
    model = cfg.model
    if not model.qk_clip:
        return
    if (model.qk_layernorm and not model.multi_latent_attention) or model.qk_l2_norm:
        yield problem(cfg, "qk_clip", "has no effect on normalized queries and keys", "remove it")
    if model.attn_logit_softcapping is not None:
        yield problem(cfg, "qk_clip", "contradicts --attn-logit-softcapping, which bounds logits", "remove one")
    groups, ranks = model.num_query_groups, model.tensor_model_parallel_size
    if not model.multi_latent_attention and groups and groups < ranks:
        reason = f"is not supported with {groups} query groups on {ranks} tensor-parallel ranks, which share a key"
        yield problem(cfg, "qk_clip", reason, f"use at most --tensor-model-parallel-size {groups}")
