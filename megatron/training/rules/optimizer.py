"""Rules about optimizers, sharding of their state, and --qk-clip."""

from __future__ import annotations

from megatron.core.config.muon import MUON_OPTIMIZERS
from megatron.core.config.problems import Problems, common_divisors, problem
from megatron.training.config.pretrain_config import PretrainConfig


def optimizer_instances(cfg: PretrainConfig) -> Problems:
    """Require a number of instances that divides DP x CP, and with FSDP2 leaves several ranks each."""
    field, ranks = "num_distributed_optimizer_instances", cfg.data_parallel_size * cfg.model.context_parallel_size
    instances = cfg.distributed.num_distributed_optimizer_instances
    if instances > 1 and ranks % instances:
        reason = f"does not divide the {ranks} ranks of data and context parallelism"
        yield problem(cfg, field, reason, f"one of {common_divisors(ranks)}")
    if cfg.distributed.use_torch_fsdp2 and instances == ranks > 1:
        yield problem(cfg, field, "leaves one rank per instance, which shards nothing", f"less than {ranks}")


def loss_scale_settings(cfg: PretrainConfig) -> Problems:
    if cfg.optimizer.min_loss_scale > cfg.optimizer.initial_loss_scale:
        yield problem(cfg, "min_loss_scale", f"is larger than --initial-loss-scale {cfg.optimizer.initial_loss_scale}")


def moments_in_bf16(cfg: PretrainConfig) -> Problems:
    """Reject bf16 moments with 1 - beta < 2**-7."""
    for field, beta in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
        decay = getattr(cfg.optimizer, beta)
        if cfg.optimizer.use_precision_aware_optimizer and getattr(cfg.flat, field) == "bf16" and 1 - decay < 2**-7:
            flag = "--" + beta.replace("_", "-")
            reason = f"has 8 significant bits, too few for {flag} {decay}: moments would never decay"
            yield problem(cfg, field, reason, f"{flag} 0.99 or less, or fp32")


def fused_qkv_is_one_parameter(cfg: PretrainConfig) -> Problems:
    """Reject --muon-no-split-qkv with query groups that ranks share: they store queries separately."""
    if cfg.optimizer.optimizer not in MUON_OPTIMIZERS or cfg.optimizer.muon_split_qkv:
        return
    groups, ranks = cfg.model.num_query_groups, cfg.model.tensor_model_parallel_size
    if not cfg.model.multi_latent_attention and groups and groups < ranks:
        reason = f"is not supported with {groups} query groups on {ranks} tensor-parallel ranks, which store them apart"
        yield problem(cfg, "muon_split_qkv", reason, f"remove it, or use at most --tensor-model-parallel-size {groups}")


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
