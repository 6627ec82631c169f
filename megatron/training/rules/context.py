"""Rules of context parallelism."""

from __future__ import annotations

import math

from megatron.core.config.problems import Problems, missing, nearest_multiples, problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import sequence_lengths


def context_parallel_sequence_length(cfg: PretrainConfig) -> Problems:
    cp = cfg.model.context_parallel_size
    for field, length in sequence_lengths(cfg):
        if cp > 1 and length % (2 * cp):
            reason = f"is not a multiple of 2 x --context-parallel-size {cp}: each rank holds an early and a late chunk"
            yield problem(cfg, field, reason, nearest_multiples(length, 2 * cp))


def cp_comm_type_count(cfg: PretrainConfig) -> Problems:
    count, layers = len(cfg.model.cp_comm_type), cfg.model.num_layers
    if layers and count not in (1, layers):
        reason = f"has {count} values for --num-layers {layers}"
        yield problem(cfg, "cp_comm_type", reason, f"give one value, or {layers}")


def all_to_all_heads(cfg: PretrainConfig) -> Problems:
    """Reject heads and query groups that are no multiple of TP times the ranks of the head all-to-all."""
    model = cfg.model
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    levels = model.hierarchical_context_parallel_sizes
    sizes = {"a2a": cp, "a2a+p2p": levels[0] if levels else 1}
    for kind in sorted(set(model.cp_comm_type) & set(sizes)):
        ranks = tp * sizes[kind]
        if cp == 1 or ranks < 1:
            continue
        product = f"{ranks} (--tensor-model-parallel-size {tp} x {sizes[kind]} ranks of --cp-comm-type {kind})"
        for field in ("num_attention_heads", "num_query_groups"):
            value = getattr(cfg.flat, field)
            if value and value > 0 and value % ranks:
                fix = f"{nearest_multiples(value, ranks)}; or --cp-comm-type p2p or allgather, which split no heads"
                yield problem(cfg, field, f"is not a multiple of {product}", fix)


def hierarchical_context_parallel_sizes(cfg: PretrainConfig) -> Problems:
    """Require two positive sizes with product CP for --cp-comm-type a2a+p2p."""
    cp, levels = cfg.model.context_parallel_size, cfg.model.hierarchical_context_parallel_sizes
    field, required = "hierarchical_context_parallel_sizes", "a2a+p2p" in cfg.model.cp_comm_type
    pairs = ", ".join(f"{size} {cp // size}" for size in range(2, cp) if cp % size == 0) or f"{cp} 1"
    if required and cp > 1 and levels is None:
        yield missing(cfg, field, "is required by --cp-comm-type a2a+p2p", f"ranks inside and outside: {pairs}")
    if levels is None:
        return
    if len(levels) != 2 or min(levels) < 1 or math.prod(levels) != cp:
        reason = f"must be two sizes whose product is --context-parallel-size {cp}"
        yield problem(cfg, field, reason, f"for example: {pairs}")
