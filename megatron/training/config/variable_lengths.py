"""Settings of the planner (``core/schedules/variable_lengths.py``), from a run's configuration. Torch-free."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron.core.config.fp8 import ALIGNED, BLOCK
from megatron.core.description.model import ModelDescription
from megatron.core.pipeline_parallel.balance import ATTENTION_RATE
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.core.schedules.variable_lengths import CostModel, Ranks
from megatron.training.config.pretrain_config import PretrainConfig

FLOPS_PER_BYTE = 2000.0
"""FLOPs in the time of receiving one byte: 400 TFLOP/s and 200 GB/s, between GPUs of one host."""
STEP_TOKENS = 64
"""Tokens of linear layers in the time of launching the kernels of one micro-batch."""


class PlanSettings(NamedTuple):
    """Settings of the planner, for one run."""

    ranks: Ranks
    cost: CostModel
    stages: int
    multiple: int
    """Divisor of the tokens that a rank holds of a row; padding fills rows up to it."""


def local_multiple(cfg: PretrainConfig) -> int:
    """Return the divisor of the tokens that a rank holds of a row: 2 for the halves of context parallelism, TP with
    sequence parallelism, and the block of fp8 GEMMs."""
    model, ranks = cfg.model, cfg.data_parallel_size * cfg.model.context_parallel_size
    shared = model.context_parallel_size > 1 or (model.hybrid_context_parallel and ranks > 1)
    tp = model.tensor_model_parallel_size if model.sequence_parallel else 1
    block = 1
    if model.fp8 is not None:
        block = 2 * BLOCK * tp if model.fp8_recipe == "blockwise" else ALIGNED
    return math.lcm(2 if shared else 1, tp, block)


def token_limit(cfg: PretrainConfig) -> int:
    """Return the tokens of a row that one rank holds: --max-seqlen-per-dp-cp-rank, or --seq-length / CP."""
    given, multiple = cfg.model.max_seqlen_per_dp_cp_rank, local_multiple(cfg)
    if given is not None:
        return given
    return math.ceil(cfg.data.seq_length / cfg.model.context_parallel_size / multiple) * multiple


def plan_ranks(cfg: PretrainConfig) -> Ranks:
    """Return the ranks and limits of plans. Ranks that communicate in every micro-batch must run the same number of
    them: pipelines, whose schedules depend on it; expert parallelism; FSDP."""
    model, cp = cfg.model, cfg.model.context_parallel_size
    chunks = virtual_pipeline_size(model)
    aligned = model.pipeline_model_parallel_size > 1 or cfg.distributed.use_torch_fsdp2
    aligned |= model.num_moe_experts is not None and model.expert_model_parallel_size > 1
    dynamic = model.hybrid_context_parallel
    group = model.microbatch_group_size_per_virtual_pipeline_stage or model.pipeline_model_parallel_size
    return Ranks(
        count=cfg.data_parallel_size * cp,
        limit=token_limit(cfg),
        smallest=model.min_dynamic_context_parallel_size if dynamic else cp,
        largest=None if dynamic else cp,
        aligned=group if chunks > 1 else int(aligned),
    )


def flops_by_length(description: ModelDescription, length: int) -> tuple[float, float]:
    """Return model FLOPs, forward and backward, per token and per squared length of a sample, of a ``description`` for
    samples of ``length`` tokens, and of its companions forward. A window counts as if it grew with the sample."""
    ops = [(op.kind, op.flops * (1 + op.backward)) for piece in description.pieces for op in piece.ops]
    ops += [(op.kind, op.flops) for model in description.companions for piece in model.pieces for op in piece.ops]
    linear = sum(flops for kind, flops in ops if kind != "attention") / length
    return linear, sum(flops for kind, flops in ops if kind == "attention") / length**2


def model_cost(cfg: PretrainConfig, description: ModelDescription) -> CostModel:
    """Return modeled times in FLOPs of GEMMs, forward and backward: attention FLOPs at their measured rate, and the
    keys and values of other ranks, which a ring exchanges in forward and twice in backward."""
    model, ranks = cfg.model, cfg.model.tensor_model_parallel_size
    linear, square = flops_by_length(description, cfg.data.seq_length)
    groups = max(1, (model.num_query_groups or model.num_attention_heads) // ranks)
    bytes_per_token = 3 * 2 * 2 * groups * (model.kv_channels or 0) * model.num_layers
    token, square = linear / ranks, square / ATTENTION_RATE / ranks
    return CostModel(token, square, bytes_per_token * FLOPS_PER_BYTE, STEP_TOKENS * token)


def plan_settings(cfg: PretrainConfig, description: ModelDescription) -> PlanSettings:
    """Return the planner's settings."""
    stages = cfg.model.pipeline_model_parallel_size
    return PlanSettings(plan_ranks(cfg), model_cost(cfg, description), stages, local_multiple(cfg))
