"""Rules of --optimizer muon and adaptive_muon."""

from __future__ import annotations

from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.config.muon import CUBIC_STEPS, MUON_OPTIMIZERS
from megatron.core.config.problems import Problems, problem
from megatron.training.config.pretrain_config import PretrainConfig


def blockwise_orthogonalization(cfg: PretrainConfig) -> Problems:
    if cfg.optimizer.optimizer not in MUON_OPTIMIZERS:
        return
    shards = max(cfg.model.tensor_model_parallel_size, expert_tensor_ranks(cfg.model))
    if cfg.optimizer.muon_tp_mode == "blockwise" and shards > 1:
        reason = f"orthogonalizes each of {shards} shards separately, so that results depend on the layout"
        yield problem(cfg, "muon_tp_mode", reason, "use duplicated")


def cubic_coefficients_have_five_steps(cfg: PretrainConfig) -> Problems:
    muon = cfg.optimizer
    is_cubic = muon.optimizer in MUON_OPTIMIZERS and muon.muon_coefficient_type == "cubic5"
    if not is_cubic or muon.muon_num_ns_steps == CUBIC_STEPS:
        return
    reason = f"must be {CUBIC_STEPS} with --muon-coefficient-type cubic5: fewer or more steps do not converge"
    yield problem(cfg, "muon_num_ns_steps", reason, f"use {CUBIC_STEPS}")


def fused_qkv_is_one_parameter(cfg: PretrainConfig) -> Problems:
    """Reject --muon-no-split-qkv with fewer query groups than tensor-parallel ranks, which store queries apart from
    keys and values."""
    if cfg.optimizer.optimizer not in MUON_OPTIMIZERS or cfg.optimizer.muon_split_qkv:
        return
    groups, ranks = cfg.model.num_query_groups, cfg.model.tensor_model_parallel_size
    if not cfg.model.multi_latent_attention and groups and groups < ranks:
        reason = f"is not supported with {groups} query groups on {ranks} tensor-parallel ranks, which store them apart"
        yield problem(cfg, "muon_split_qkv", reason, f"remove it, or use at most --tensor-model-parallel-size {groups}")
