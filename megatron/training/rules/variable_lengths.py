"""Rules about samples of different lengths (--use-varlen-dataset) and a context-parallel size per micro-batch."""

from __future__ import annotations

from megatron.core.config.errors import counted
from megatron.core.config.problems import Problems, missing, nearest_multiples, problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.variable_lengths import local_multiple, plan_ranks, token_limit


def samples_fit_ranks(cfg: PretrainConfig) -> Problems:
    """Reject samples that all ranks together do not hold, and limits that are no multiple of the parts of a row."""
    if not cfg.variable_lengths.use_varlen_dataset or not cfg.data.seq_length:
        return
    ranks, limit, multiple = plan_ranks(cfg), token_limit(cfg), local_multiple(cfg)
    if limit % multiple:
        reason = f"is not a multiple of {multiple}, by which context and sequence parallelism or fp8 split rows"
        yield problem(cfg, "max_seqlen_per_dp_cp_rank", reason, nearest_multiples(limit, multiple))
    if cfg.model.hybrid_context_parallel and ranks.count > 1 and ranks.count % 2:
        reason = f"requires an even number of data- and context-parallel ranks, not {ranks.count}"
        yield problem(cfg, "hybrid_context_parallel", reason, "change the number of ranks, or remove it")
        return
    least = ranks.smallest
    if cfg.model.hybrid_context_parallel and (least & (least - 1) or ranks.count % least):
        reason = f"must be a power of two that divides the {ranks.count} data- and context-parallel ranks"
        yield problem(cfg, "min_dynamic_context_parallel_size", reason, "set 1")
        return
    most = ranks.largest_block * limit
    if cfg.data.seq_length > most:
        place = f"{counted(ranks.largest_block, 'rank')} of {limit} tokens"
        reason = f"a sample of --seq-length {cfg.data.seq_length} does not fit {place}"
        yield missing(
            cfg, "max_seqlen_per_dp_cp_rank", reason, f"at least {-(-cfg.data.seq_length // ranks.largest_block)}"
        )


def all_to_all_heads_of_blocks(cfg: PretrainConfig) -> Problems:
    """Require heads and query groups to be multiples of TP times the largest context-parallel size for a2a."""
    model = cfg.model
    if not (model.hybrid_context_parallel and "a2a" in model.cp_comm_type):
        return
    size = plan_ranks(cfg).largest_block
    for field in ("num_attention_heads", "num_query_groups"):
        value = getattr(cfg.flat, field)
        if value and value > 0 and value % (model.tensor_model_parallel_size * size):
            reason = f"is not a multiple of --tensor-model-parallel-size x the largest context-parallel size {size}"
            yield problem(cfg, field, reason, "--cp-comm-type p2p or allgather, which split no heads")
