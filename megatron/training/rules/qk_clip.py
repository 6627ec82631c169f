"""Rules of --qk-clip."""

from __future__ import annotations

from megatron.core.config.problems import Problems, problem
from megatron.training.config.pretrain_config import PretrainConfig


def gives_logits(cfg: PretrainConfig) -> bool:
    """Whether maximum attention logits can be measured: not by other kernels, in CUDA graphs or with a bias."""
    return (
        cfg.model.transformer_impl != "transformer_engine"
        and cfg.training.cuda_graph_impl != "local"
        and cfg.embeddings.position_embedding_type != "relative"
    )


def clipped_keys_are_on_one_rank(cfg: PretrainConfig) -> Problems:
    model = cfg.model
    groups, ranks = model.num_query_groups, model.tensor_model_parallel_size
    if model.qk_clip and not model.multi_latent_attention and groups and groups < ranks:
        reason = f"is not supported with {groups} query groups on {ranks} tensor-parallel ranks, which share a key"
        yield problem(cfg, "qk_clip", reason, f"use at most --tensor-model-parallel-size {groups}")
