"""Rules about mixtures of experts: router, capacity, and how experts are split over ranks."""

from __future__ import annotations

import math

from megatron.core.config.errors import counted
from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.config.problems import Problems, problem
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.layout import common_divisors, how_to_start, nearest_multiples

NO_LOSS = ("sinkhorn", "quantile_balancing", "none")
"""Kinds of balance that are no loss."""


def expert_settings_need_experts(cfg: PretrainConfig) -> Problems:
    if cfg.model.num_moe_experts is None and cfg.model.expert_model_parallel_size > 1:
        yield problem(cfg, "expert_model_parallel_size", "needs experts", "--num-experts N")
    if cfg.model.num_moe_experts is None and cfg.model.overlap_moe_expert_parallel_comm:
        yield problem(cfg, "overlap_moe_expert_parallel_comm", "needs experts", "--num-experts N")


def moe_layer_pattern(cfg: PretrainConfig) -> Problems:
    pattern = cfg.model.moe_layer_freq if cfg.model.num_moe_experts else 1
    if isinstance(pattern, list) and cfg.model.num_layers and len(pattern) != cfg.model.num_layers:
        yield problem(cfg, "moe_layer_freq", f"has {len(pattern)} entries for {cfg.model.num_layers} layers")


def experts_divide_evenly(cfg: PretrainConfig) -> Problems:
    """Require --num-experts to be a multiple of the expert-parallel size, --moe-ffn-hidden-size of the
    expert-tensor-parallel size, and --moe-shared-expert-intermediate-size of the tensor-parallel size. Checks nothing
    without experts."""
    experts, ep = cfg.model.num_moe_experts, cfg.model.expert_model_parallel_size
    if experts is None:
        return
    if experts % ep:
        fix = f"{nearest_multiples(experts, ep)}; or an --expert-model-parallel-size of {common_divisors(experts)}"
        yield problem(cfg, "num_moe_experts", f"is not a multiple of --expert-model-parallel-size {ep}", fix)
    etp, width = expert_tensor_ranks(cfg.model), cfg.model.moe_ffn_hidden_size
    if width and width % etp:
        reason = f"is not a multiple of the {etp} expert-tensor-parallel ranks"
        yield problem(cfg, "moe_ffn_hidden_size", reason, nearest_multiples(width, etp))
    shared, tp = cfg.model.moe_shared_expert_intermediate_size, cfg.model.tensor_model_parallel_size
    if shared and shared % tp:
        reason = f"is not a multiple of --tensor-model-parallel-size {tp}"
        yield problem(cfg, "moe_shared_expert_intermediate_size", reason, nearest_multiples(shared, tp))


def expert_grid_fits_world_size(cfg: PretrainConfig) -> Problems:
    """Require EP x expert-TP x PP to divide the world size; if it does, require --num-distributed-optimizer-instances
    to divide the remaining expert data-parallel ranks. Checks nothing without experts."""
    ep, etp, pp = (
        cfg.model.expert_model_parallel_size,
        expert_tensor_ranks(cfg.model),
        cfg.model.pipeline_model_parallel_size,
    )
    if cfg.model.num_moe_experts is None:
        return
    if cfg.world_size % (ep * etp * pp):
        reason = f"x expert-tensor-parallel {etp} x pipeline {pp} does not divide the world size {cfg.world_size}"
        fitting = common_divisors(
            max(cfg.world_size // math.gcd(cfg.world_size, etp * pp), 1), cfg.model.num_moe_experts
        )
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
            cfg, "num_moe_experts", "with --tensor-model-parallel-size > 1 requires --sequence-parallel",
            "add --sequence-parallel",
        )  # fmt: skip


def router_settings(cfg: PretrainConfig) -> Problems:
    """Reject router settings that cannot work: top-k above --num-experts; top-1 softmax after selection (without
    --moe-router-pre-softmax or sinkhorn), whose weight is always 1; expert bias with softmax scores; sinkhorn with
    expert bias, groups or non-softmax scores. Checks nothing without experts."""
    experts, top, scores = cfg.model.num_moe_experts, cfg.model.moe_router_topk, cfg.model.moe_router_score_function
    if experts is None:
        return
    if top > experts:
        yield problem(cfg, "moe_router_topk", f"is more than --num-experts {experts}")
    if top == 1 and scores == "softmax" and not cfg.model.moe_router_pre_softmax and not _uses(cfg, "sinkhorn"):
        reason = "gives the router no gradient: the softmax over one selected expert is always 1"
        yield problem(cfg, "moe_router_topk", reason, "add --moe-router-pre-softmax")
    if cfg.model.moe_router_enable_expert_bias and scores == "softmax":
        reason = "requires scores that are independent per expert"
        yield problem(cfg, "moe_router_enable_expert_bias", reason, "--moe-router-score-function sigmoid")
    other_choice = cfg.model.moe_router_enable_expert_bias or cfg.model.moe_router_num_groups or scores != "softmax"
    if _uses(cfg, "sinkhorn") and other_choice:
        reason = "sinkhorn does not support expert groups, an expert bias or other score functions"
        yield problem(cfg, "moe_router_load_balancing_type", reason)


def quantile_balancing_settings(cfg: PretrainConfig) -> Problems:
    """For quantile_balancing, reject expert bias, router groups and a capacity factor, a top-k equal to --num-experts,
    and a number of experts that does not divide micro-batch size x --seq-length x top-k. Checks nothing for other
    balancing types."""
    experts, top = cfg.model.num_moe_experts, cfg.model.moe_router_topk
    if experts is None or not _uses(cfg, "quantile_balancing"):
        return
    if (
        cfg.model.moe_router_enable_expert_bias
        or cfg.model.moe_router_num_groups
        or cfg.model.moe_expert_capacity_factor is not None
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


def expert_groups(cfg: PretrainConfig) -> Problems:
    """Require --moe-router-num-groups and --moe-router-group-topk together; groups must divide --num-experts, group
    top-k must not exceed the groups, and the selected groups must hold top-k experts (a multiple of them unless
    --moe-router-group-score-topk is set). Checks nothing without experts."""
    experts, groups, chosen = (
        cfg.model.num_moe_experts,
        cfg.model.moe_router_num_groups,
        cfg.model.moe_router_group_topk,
    )
    if experts is None or (groups is None and chosen is None):
        return
    if groups is None or chosen is None:
        field, other = ("moe_router_num_groups", "moe_router_group_topk")[:: 1 if chosen is None else -1]
        yield problem(cfg, field, f"needs --{other.replace('_', '-')}", "give both or none")
        return
    if experts % groups:
        reason = f"does not divide --num-experts {experts}"
        yield problem(cfg, "moe_router_num_groups", reason, f"divisors: {common_divisors(experts)}")
    size, by_default = experts // groups, cfg.model.moe_router_group_score_topk is None
    if chosen > groups:
        yield problem(cfg, "moe_router_group_topk", f"is more than --moe-router-num-groups {groups}")
    elif (by_default and cfg.model.moe_router_topk % chosen) or cfg.model.moe_router_topk > chosen * size:
        reason = f"does not divide --moe-router-topk {cfg.model.moe_router_topk} evenly among groups of {size} experts"
        yield problem(cfg, "moe_router_group_topk", reason)


def expert_group_scores(cfg: PretrainConfig) -> Problems:
    """Reject --moe-router-group-score-topk without --moe-router-num-groups, or if it is larger than the number of
    experts per group. Checks nothing without experts."""
    experts, groups, scored = (
        cfg.model.num_moe_experts,
        cfg.model.moe_router_num_groups,
        cfg.model.moe_router_group_score_topk,
    )
    if experts is None or scored is None:
        return
    if groups is None:
        yield problem(cfg, "moe_router_group_score_topk", "requires --moe-router-num-groups", "remove it")
    elif scored > experts // groups:
        reason = f"must be at most {experts // groups}, the number of experts per group"
        yield problem(cfg, "moe_router_group_score_topk", reason)


def _uses(cfg: PretrainConfig, kind: str) -> bool:
    return kind in cfg.model.moe_router_load_balancing_type


def auxiliary_loss_coefficients(cfg: PretrainConfig) -> Problems:
    """Require one --moe-aux-loss-coeff per --moe-router-load-balancing-type, zero for types that are no loss (sinkhorn,
    quantile_balancing, none). Several types must be distinct and all be losses. Checks nothing without experts."""
    kinds, coefficients = cfg.model.moe_router_load_balancing_type, cfg.model.moe_aux_loss_coeff
    if cfg.model.num_moe_experts is None:
        return
    if len(kinds) != len(coefficients):
        types = counted(len(kinds), "balancing type")
        reason = f"has {len(coefficients)} values for {types} (--moe-router-load-balancing-type)"
        yield problem(cfg, "moe_aux_loss_coeff", reason, "give one value per type")
    elif any(kind in NO_LOSS and value for kind, value in zip(kinds, coefficients)):
        yield problem(cfg, "moe_aux_loss_coeff", "applies only to auxiliary losses", f"0 for {', '.join(NO_LOSS)}")
    if len(kinds) > 1 and (set(NO_LOSS) & set(kinds) or len(set(kinds)) < len(kinds)):
        reason = f"may list several auxiliary losses, each once, but not together with {', '.join(NO_LOSS)}"
        yield problem(cfg, "moe_router_load_balancing_type", reason)


def expert_capacity_settings(cfg: PretrainConfig) -> Problems:
    """Reject --moe-pad-expert-input-to-capacity without --moe-expert-capacity-factor, and a capacity factor together
    with sinkhorn. Checks nothing without experts."""
    if cfg.model.num_moe_experts is None:
        return
    if cfg.model.moe_pad_expert_input_to_capacity and cfg.model.moe_expert_capacity_factor is None:
        reason = "needs --moe-expert-capacity-factor: without it no token is dropped or padded"
        yield problem(cfg, "moe_pad_expert_input_to_capacity", reason, "give it, for example 1.0")
    if cfg.model.moe_expert_capacity_factor is not None and _uses(cfg, "sinkhorn"):
        yield problem(cfg, "moe_expert_capacity_factor", "contradicts sinkhorn, which has no capacity")


def static_rows_need_allgather(cfg: PretrainConfig) -> Problems:
    if cfg.model.moe_static_rows and cfg.model.moe_token_dispatcher_type != "allgather":
        reason = "requires the allgather dispatcher: others need token counts on the host"
        yield problem(cfg, "moe_static_rows", reason, "--moe-token-dispatcher-type allgather")


def upcycling_settings(cfg: PretrainConfig) -> Problems:
    """For --moe-use-upcycling, require --num-experts, a checkpoint (--load or --pretrained-checkpoint), and a
    --moe-upcycling-granularity that divides --num-experts. Does not look at the checkpoint."""
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


def shared_expert_settings(cfg: PretrainConfig) -> Problems:
    """Reject --moe-shared-expert-overlap and --moe-shared-expert-gate in a model with experts if
    --moe-shared-expert-intermediate-size is not set."""
    if cfg.model.moe_shared_expert_intermediate_size is not None:
        return
    for field in ("moe_shared_expert_overlap", "moe_shared_expert_gate"):
        if getattr(cfg.flat, field) and cfg.model.num_moe_experts is not None:
            reason = "needs a shared expert"
            yield problem(cfg, field, reason, "--moe-shared-expert-intermediate-size N, or remove it")


def experts_without_cuda_graphs(cfg: PretrainConfig) -> Problems:
    if cfg.model.num_moe_experts is not None and cfg.training.cuda_graph_impl == "local":
        yield problem(cfg, "cuda_graph_impl", "does not capture experts, because their token counts vary", "remove it")
