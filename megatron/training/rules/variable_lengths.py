"""Rules of samples of different lengths (--use-varlen-dataset) and of a context-parallel size per micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.errors import counted
from megatron.core.config.problems import Problems, missing, nearest_multiples, problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.variable_lengths import local_multiple, plan_ranks, token_limit

FLAG = "--use-varlen-dataset"
_OF_SAMPLES = {"none", "seq_aux_loss", "global_aux_loss"}
"""Balancing types that do not depend on the samples that share a micro-batch."""


def varlen_requires(cfg: PretrainConfig) -> Problems:
    """Require --use-varlen-dataset for the flags that depend on it, and --mock-data for lengths of mock documents."""
    if cfg.model.min_dynamic_context_parallel_size > 1 and not cfg.model.hybrid_context_parallel:
        yield problem(cfg, "min_dynamic_context_parallel_size", "requires --hybrid-context-parallel", "add it")
    if cfg.variable_lengths.use_varlen_dataset:
        if cfg.variable_lengths.varlen_mock_dataset_config_json is not None and not cfg.data.mock_data:
            yield problem(cfg, "varlen_mock_dataset_config_json", "requires --mock-data", "add it, or remove this flag")
        return
    for field in ("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank", "varlen_mock_dataset_config_json"):
        if getattr(cfg.flat, field):
            yield problem(cfg, field, f"requires {FLAG}", "add it, or remove this flag")


def varlen_conflicts(cfg: PretrainConfig) -> Problems:
    """Reject settings that contradict rows of packed samples."""
    if not cfg.variable_lengths.use_varlen_dataset:
        return
    for field, reason, fix in _conflicts(cfg):
        yield problem(cfg, field, reason, fix)


def _conflicts(cfg: PretrainConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (field, reason, fix)."""
    model, rows = cfg.model, f"is not supported with {FLAG}"
    for field in ("reset_position_ids", "reset_attention_mask"):
        if getattr(cfg.documents, field):
            yield field, f"contradicts {FLAG}, whose samples are documents", "remove it"
    if cfg.training.micro_batch_size != 1:
        yield (
            "micro_batch_size",
            f"must be 1 with {FLAG}: a micro-batch is one row of packed samples",
            "set 1, and the tokens of a row by --max-seqlen-per-dp-cp-rank",
        )
    if cfg.validation.eval_micro_batch_size not in (None, 1) and "eval_micro_batch_size" in cfg.explicit:
        yield "eval_micro_batch_size", f"must be 1 with {FLAG}", "set 1"
    if cfg.data.dataloader_type == "external":
        yield "dataloader_type", rows, "use single or cyclic"
    if model.transformer_impl == "transformer_engine":
        yield "transformer_impl", rows, "use local"
    if "a2a+p2p" in model.cp_comm_type:
        yield "cp_comm_type", rows, "use p2p, a2a or allgather"
    if cfg.flat.cuda_graph_impl != "none":
        yield "cuda_graph_impl", f"{rows}: the shapes of micro-batches vary", "remove it"
    yield from _expert_conflicts(cfg)


def _expert_conflicts(cfg: PretrainConfig) -> Iterator[tuple[str, str, str]]:
    """Yield settings of experts that depend on which tokens share a micro-batch."""
    model = cfg.model
    if model.num_moe_experts is None:
        return
    reason = f"depends on the tokens of a micro-batch, which {FLAG} chooses"
    if set(model.moe_router_load_balancing_type) - _OF_SAMPLES:
        fix = "use seq_aux_loss, global_aux_loss, or none with --moe-router-enable-expert-bias"
        yield "moe_router_load_balancing_type", reason, fix
    if model.moe_expert_capacity_factor:
        yield "moe_expert_capacity_factor", reason, "remove it"
    if model.moe_router_force_load_balancing:
        yield "moe_router_force_load_balancing", reason, "remove it"


def samples_fit_ranks(cfg: PretrainConfig) -> Problems:
    """Reject samples that all ranks together do not hold, and limits that are no multiple of what ranks split."""
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
