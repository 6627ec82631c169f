"""Rules about mixtures of experts: router, capacity, and how experts are split over ranks."""

from __future__ import annotations

import math

from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.config.problems import Problems, common_divisors, problem
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.layout import how_to_start


def expert_settings_need_experts(cfg: PretrainConfig) -> Problems:
    if cfg.model.num_moe_experts is None and cfg.model.overlap_moe_expert_parallel_comm:
        yield problem(cfg, "overlap_moe_expert_parallel_comm", "needs experts", "--num-experts N")


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


def experts_require_sequence_parallel(cfg: PretrainConfig) -> Problems:
    """With tensor but without sequence parallelism every rank would route, and count, the same tokens."""
    if (
        cfg.model.num_moe_experts is not None
        and cfg.model.tensor_model_parallel_size > 1
        and not cfg.model.sequence_parallel
    ):
        yield problem(
            cfg,
            "num_moe_experts",
            "with --tensor-model-parallel-size > 1 requires --sequence-parallel",
            "add --sequence-parallel",
        )


def quantile_balancing_settings(cfg: PretrainConfig) -> Problems:
    """Reject what quantile_balancing cannot balance: expert bias, router groups, a capacity factor, top-k equal to
    --num-experts, and a number of experts that does not divide the selected tokens."""
    model = cfg.model
    experts, top = model.num_moe_experts, model.moe_router_topk
    if experts is None or "quantile_balancing" not in model.moe_router_load_balancing_type:
        return
    if (
        model.moe_router_enable_expert_bias
        or model.moe_router_num_groups
        or model.moe_expert_capacity_factor is not None
    ):
        reason = "quantile_balancing does not support an expert bias, expert groups or a capacity factor"
        yield problem(cfg, "moe_router_load_balancing_type", reason)
    if top == experts:
        reason = "selects all experts, so that quantile_balancing has no choice"
        yield problem(cfg, "moe_router_topk", reason, f"at most {experts - 1}")
    choices = (cfg.training.micro_batch_size or 0) * (cfg.data.seq_length or 0) * top
    if choices % experts:
        reason = f"does not divide the {choices} (token, expert) pairs of a micro-batch (quantile_balancing)"
        yield problem(cfg, "num_moe_experts", reason, "another --micro-batch-size")


def upcycling_settings(cfg: PretrainConfig) -> Problems:
    """Require experts, a checkpoint and a granularity that divides --num-experts for --moe-use-upcycling."""
    slices, experts = cfg.upcycling.moe_upcycling_granularity, cfg.model.num_moe_experts
    if not cfg.upcycling.moe_use_upcycling:
        return
    if experts is None:
        yield problem(cfg, "moe_use_upcycling", "needs experts", "--num-experts N")
    if not (cfg.checkpoint.load or cfg.checkpoint.pretrained_checkpoint):
        reason = "needs the dense model's checkpoint"
        yield problem(cfg, "moe_use_upcycling", reason, "--load DIRECTORY, or --pretrained-checkpoint DIRECTORY")
    if experts is not None and experts % slices:
        reason = f"does not divide --num-experts {experts}"
        yield problem(cfg, "moe_upcycling_granularity", reason, f"divisors: {common_divisors(experts)}")


def experts_in_cuda_graphs(cfg: PretrainConfig) -> Problems:
    """Require local experts and grouped GEMMs in CUDA graphs: others read the numbers of rows on the host."""
    model = cfg.model
    if model.num_moe_experts is None or cfg.training.cuda_graph_impl != "local":
        return
    widths = [width for width in (model.hidden_size, model.moe_ffn_hidden_size) if width]
    reasons = {
        "contains collectives (--expert-model-parallel-size)": model.expert_model_parallel_size > 1,
        "contains collectives (--expert-tensor-parallel-size)": (model.expert_tensor_parallel_size or 1) > 1,
        "reads the rows of each expert on the host (without --bf16)": not model.bf16,
        "reads the rows of each expert on the host (--no-moe-fusion)": not model.moe_fusion,
        f"reads the rows of each expert on the host (widths {widths}, not multiples of 8)": any(
            width % 8 for width in widths
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            reason = f"records one micro-batch as a CUDA graph, which here {reason}"
            yield problem(cfg, "cuda_graph_impl", reason, "leave one of the two out")
