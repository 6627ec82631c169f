"""Rules about mixtures of experts: router, capacity, and how experts are split over ranks."""

from __future__ import annotations

import math

from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.config.problems import Problems, common_divisors, problem
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.layout import how_to_start


def expert_grid_fits_world_size(cfg: PretrainConfig) -> Problems:
    """Require EP x expert-TP x PP to divide the world size, and optimizer instances to divide the remaining ranks."""
    model = cfg.model
    ep, etp, pp = model.expert_model_parallel_size, expert_tensor_ranks(cfg.model), model.pipeline_model_parallel_size
    if model.num_moe_experts is None:
        return
    if cfg.world_size % (ep * etp * pp):
        reason = f"x expert-tensor-parallel {etp} x pipeline {pp} does not divide the world size {cfg.world_size}"
        fitting = common_divisors(max(cfg.world_size // math.gcd(cfg.world_size, etp * pp), 1), model.num_moe_experts)
        fix = f"sizes that do: {fitting}"
        if launched_world_size() is None and cfg.world_size == 1:
            fix = how_to_start(cfg)
        yield problem(cfg, "expert_model_parallel_size", reason, fix)
    elif (cfg.world_size // (ep * etp * pp)) % cfg.distributed.num_distributed_optimizer_instances:
        reason = f"do not divide the {cfg.world_size // (ep * etp * pp)} data-parallel ranks of experts"
        yield problem(cfg, "num_distributed_optimizer_instances", reason)


def quantile_balancing_settings(cfg: PretrainConfig) -> Problems:
    """Reject top-k equal to --num-experts, and experts that do not divide the selected tokens."""
    model = cfg.model
    experts, top = model.num_moe_experts, model.moe_router_topk
    if experts is None or "quantile_balancing" not in model.moe_router_load_balancing_type:
        return
    if top == experts:
        reason = "selects all experts, so that quantile_balancing has no choice"
        yield problem(cfg, "moe_router_topk", reason, f"at most {experts - 1}")
    choices = (cfg.training.micro_batch_size or 0) * (cfg.data.seq_length or 0) * top
    if choices % experts:
        reason = f"does not divide the {choices} (token, expert) pairs of a micro-batch (quantile_balancing)"
        yield problem(cfg, "num_moe_experts", reason, "another --micro-batch-size")


def upcycling_settings(cfg: PretrainConfig) -> Problems:
    slices, experts = cfg.upcycling.moe_upcycling_granularity, cfg.model.num_moe_experts
    if cfg.upcycling.moe_use_upcycling and experts is not None and experts % slices:
        reason = f"does not divide --num-experts {experts}"
        yield problem(cfg, "moe_upcycling_granularity", reason, f"divisors: {common_divisors(experts)}")
