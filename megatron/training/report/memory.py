"""Bytes that each pipeline rank needs for a training step, from the settings alone. Torch-free.

Weights, gradients and optimizer state are exact: the parameters of the model's description, stage by stage, cut into
buckets and shards by the same functions as the buffers themselves. Activations are an estimate of what autograd keeps,
as described, times the micro-batches that the schedule keeps alive, and what one layer's backward pass adds while it
runs.

Operations are those that GPUs run; plain torch on CPUs keeps up to a fifth more between attention's projections.
Left out: what the allocator, kernels and the communication library take, and fragments (some GB on a GPU).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.description.model import ModelDescription, Param, Piece, kept_bytes
from megatron.core.description.parts import activation_bytes, stream_elements
from megatron.core.pipeline_parallel.simulate import peak_activations
from megatron.core.pipeline_parallel.stages import StageContents
from megatron.core.sharding.buffer_layout import bucket_alignment, chosen_bucket_size, cut_buffer, owned_elements
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.model_description import describe_run
from megatron.training.report.pipeline import enough_microbatches, layers_held, pieces_of, schedule_of, stages_of


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank; of its data- and tensor-parallel ranks, the one that needs most."""

    contents: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept between forward and backward passes, at the fullest moment."""
    working: int
    """Memory that comes and goes on top: gradients of one layer's activations, weights gathered for a layer."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def estimate_memory(cfg: PretrainConfig, vocab_size: int) -> list[RankMemory]:
    """One row per pipeline rank; ``vocab_size`` before padding (0: unknown, counted as nothing)."""
    ranks, model = cfg.pipeline_model_parallel_size, describe_run(cfg, vocab_size)
    stages = stages_of(cfg, vocab_size or None)
    schedule = schedule_of(cfg, enough_microbatches(cfg))
    kept = peak_activations(schedule, weight=lambda stage: float(stage_activations(cfg, model, stages[stage])))
    return [_rank_memory(cfg, model, stages[rank::ranks], int(kept[rank])) for rank in range(ranks)]


def _rank_memory(
    cfg: PretrainConfig, model: ModelDescription, chunks: Sequence[StageContents], kept: int
) -> RankMemory:  # fmt: skip
    states = [_chunk_state(cfg, model, chunk) for chunk in chunks]
    weights, gradients, optimizer, working = (sum(column) for column in zip(*states))
    working += max(_backward_bytes(cfg, layers_held(model, chunk)) for chunk in chunks)
    return RankMemory("; ".join(map(str, chunks)), weights, gradients, optimizer, kept, working)


# ---- parameters


class Stored(NamedTuple):
    """A parameter, or one of its parts, on this tensor-parallel rank."""

    param: Param
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def stored_parameters(cfg: PretrainConfig, pieces: Sequence[Piece]) -> list[Stored]:
    """Those of the pieces of a stage, in the order in which they are built. What is tied to a parameter of the same
    stage is that parameter."""
    params = [each for piece in pieces for each in piece.params]
    sizes = {
        "tp": cfg.tensor_model_parallel_size, "ep": cfg.expert_model_parallel_size, "etp": expert_tensor_ranks(cfg),
    }  # fmt: skip
    names = {each.name for each in params}
    own = [each for each in params if each.tied_to == each.name or each.tied_to not in names]
    return [Stored(each, shape) for each in own for shape in each.local_shapes(sizes)]


# ---- weights, gradients, optimizer state


def _chunk_state(cfg: PretrainConfig, model: ModelDescription, stage: StageContents) -> tuple[int, int, int, int]:
    """(weights, gradients, optimizer state, weights gathered and gradients not yet summed for one unit) in bytes."""
    parameters = stored_parameters(cfg, pieces_of(model, stage))
    if not parameters:
        return 0, 0, 0, 0
    if cfg.use_torch_fsdp2 and _sum_ranks(cfg) > 1:
        return _fully_sharded_state(cfg, parameters, layers_held(model, stage))
    # parameters that other ranks sum have buffers of their own
    ranks = _sum_ranks(cfg), _expert_sum_ranks(cfg)
    if ranks[0] == ranks[1] and cfg.expert_model_parallel_size == 1:
        return _buffer_state(cfg, model, parameters, ranks[0])
    kinds = ([each for each in parameters if each.param.is_expert is expert] for expert in (False, True))
    states = [_buffer_state(cfg, model, kind, size) for kind, size in zip(kinds, ranks) if kind]
    return tuple(map(sum, zip(*states)))  # type: ignore[return-value]


def _buffer_state(
    cfg: PretrainConfig, model: ModelDescription, parameters: list[Stored], num_ranks: int
) -> tuple[int, int, int, int]:
    """The same for parameters whose gradients ``num_ranks`` ranks sum."""
    parameters.reverse()
    sizes = [each.elements for each in parameters]
    shards = num_ranks // cfg.num_distributed_optimizer_instances if cfg.use_distributed_optimizer else 1
    # what the first and the last stage may both hold has buckets of its own, so that its shards are cut alike
    tied = cfg.pipeline_model_parallel_size > 1 and cfg.use_distributed_optimizer
    held_twice = model.embedding.params if model.predictions else model.embedding.params[:1]
    alone = [tied and (each.param.tied_to is not None or each.param in held_twice) for each in parameters]
    bucket_size = chosen_bucket_size(
        sum(sizes), bucket_size=cfg.ddp_bucket_size, num_buckets=cfg.ddp_num_buckets, overlap=cfg.overlap_grad_reduce,
        num_ranks=num_ranks,
    )  # fmt: skip
    alignment = bucket_alignment(shards, cfg.ddp_pad_buckets_for_high_nccl_busbw)
    cut = cut_buffer(sizes, alone, bucket_size, alignment)
    elements = cut.total if cfg.use_distributed_optimizer else sum(sizes)
    updated = max(owned_elements(sizes, cut, shards)) if cfg.use_distributed_optimizer else sum(sizes)
    optimizer = updated * (moment_bytes(cfg) + master_bytes(cfg))
    return elements * activation_bytes(cfg), cut.total * gradient_bytes(cfg), optimizer, 0


def _fully_sharded_state(
    cfg: PretrainConfig, parameters: Sequence[Stored], layers: Sequence[Sequence[Piece]]
) -> tuple[int, int, int, int]:
    """Rows of every parameter in full precision; beside them one layer's, and all that is in no layer, as gathered."""
    shards = _sum_ranks(cfg) // cfg.num_distributed_optimizer_instances
    rows = sum(-(-each.shape[0] // shards) * math.prod(each.shape[1:]) for each in parameters)
    units = [sum(each.elements for each in stored_parameters(cfg, layer)) for layer in layers]
    outside = sum(each.elements for each in parameters) - sum(units)
    # the next layer is gathered while one computes
    together = 2 if cfg.torch_fsdp2_reshard_after_forward else len(units)
    gathered = outside + sum(sorted(units)[-together:])
    unsummed = max([outside, *units])
    full = state_bytes(cfg)
    working = gathered * activation_bytes(cfg) + unsummed * gradient_bytes(cfg)
    return rows * full, rows * full, rows * moment_bytes(cfg), working


def _sum_ranks(cfg: PretrainConfig) -> int:
    """Ranks over which gradients are summed."""
    return cfg.data_parallel_size * cfg.context_parallel_size


def _expert_sum_ranks(cfg: PretrainConfig) -> int:
    """The same of experts' gradients."""
    held = cfg.expert_model_parallel_size * expert_tensor_ranks(cfg) * cfg.pipeline_model_parallel_size
    return max(cfg.world_size // held, 1)


def _is_half(cfg: PretrainConfig) -> bool:
    return cfg.fp16 or cfg.bf16


def state_bytes(cfg: PretrainConfig) -> int:
    """Bytes of an element of a moment in full precision."""
    return 8 if cfg.fp64 else 4


def gradient_bytes(cfg: PretrainConfig) -> int:
    """Bytes of an element of an accumulated gradient."""
    return 4 if _is_half(cfg) and cfg.accumulate_allreduce_grads_in_fp32 else activation_bytes(cfg)


def master_bytes(cfg: PretrainConfig) -> int:
    """Bytes beside a half-precision weight for its exact value: for bf16 the 16 bits that it lacks, for fp16 a copy."""
    return 2 if cfg.bf16 and cfg.store_param_remainders else 4 if _is_half(cfg) else 0


def moment_bytes(cfg: PretrainConfig) -> int:
    """Bytes of all moments of an element of a parameter."""
    if cfg.optimizer == "sgd":
        return state_bytes(cfg) if cfg.sgd_momentum else 0
    return sum(2 if kind == "bf16" and not cfg.fp64 else state_bytes(cfg)
               for kind in (cfg.exp_avg_dtype, cfg.exp_avg_sq_dtype))


# ---- activations


def _tokens(cfg: PretrainConfig) -> int:
    """Tokens of one micro-batch on this context-parallel rank."""
    return cfg.seq_length // cfg.context_parallel_size * cfg.micro_batch_size


def _recomputed(cfg: PretrainConfig) -> frozenset[str]:
    """Modules that selective recomputation computes again."""
    selective = cfg.recompute_granularity == "selective"
    return frozenset(cfg.recompute_modules or ("core_attn",)) if selective else frozenset()


def stage_activations(cfg: PretrainConfig, model: ModelDescription, stage: StageContents) -> int:
    """Bytes that one micro-batch leaves on a stage between its forward and its backward pass."""
    layers = layers_held(model, stage)
    ends = [model.embedding] * stage.embedding + [model.head] * stage.loss
    again = cfg.recompute_granularity == "full"
    later = [each for each in model.predictions if stage.num_mtp and not (again and each.is_branch)]
    total = kept_bytes(ends) + kept_bytes(later, _recomputed(cfg))
    if again:
        assert cfg.recompute_num_layers is not None
        given = min(cfg.recompute_num_layers, len(layers))
        inputs = -(-len(layers) // given) if layers and cfg.recompute_method == "uniform" else given
        share = cfg.tensor_model_parallel_size if cfg.distribute_saved_activations else 1
        total += inputs * stream_elements(cfg) * activation_bytes(cfg) / share
        layers = [] if cfg.recompute_method == "uniform" else layers[given:]
    total += sum(kept_bytes(layer, _recomputed(cfg)) for layer in layers)
    return int(total * _tokens(cfg))


def _backward_bytes(cfg: PretrainConfig, layers: Sequence[Sequence[Piece]]) -> int:
    """While one layer runs backward: its activations once more where they are recomputed, and their gradients."""
    if not layers:
        return 0
    again = _recomputed(cfg)
    total = max(_branch_gradients(branch, again) for layer in layers for branch in layer)
    total += 2 * stream_elements(cfg) * activation_bytes(cfg)
    if cfg.recompute_granularity == "full":
        together = cfg.recompute_num_layers if cfg.recompute_method == "uniform" else 1
        assert together is not None
        total += max(
            sum(map(kept_bytes, layers[first : first + together])) for first in range(0, len(layers), together)
        )
    return int(total * _tokens(cfg))


def _branch_gradients(branch: Piece, again: frozenset[str]) -> float:
    """Gradients of what operations put out; what selective recomputation brings back makes room for them in turn."""
    found = 0.0
    for op in branch.ops:
        back = sum(saved.bytes for saved in op.saved if again.intersection(saved.modules))
        found += max(op.gradients, back)
    return found


# ---- the table


def memory_rows(cfg: PretrainConfig, vocab_size: int) -> Iterator[tuple[str, str]]:
    """A table, GiB per rank, one line per pipeline rank; the largest marked where there are several."""
    ranks = estimate_memory(cfg, vocab_size)
    precision = "fp16" if cfg.fp16 else "bf16" if cfg.bf16 else "fp32"
    columns = ("weights", "gradients", "optimizer", "activations", "working", "total")
    yield "GiB per rank", "".join(f"{name:>13}" for name in columns) + f"   ({precision})"
    totals = [memory.total for memory in ranks]
    for index, memory in enumerate(ranks):
        cells = "".join(f"{getattr(memory, name) / 2**30:13.2f}" for name in columns)
        mark = "   <- the most" if len(ranks) > 1 and index == totals.index(max(totals)) else ""
        yield f"  pipeline rank {index}" if len(ranks) > 1 else "  every rank", cells + mark
    live = microbatches_alive(cfg)
    yield "  alive at most", f"{', '.join(f'{count:g}' for count in live)} micro-batches x chunks by pipeline rank"


def microbatches_alive(cfg: PretrainConfig) -> list[float]:
    """Per pipeline rank, the most (chunk, micro-batch) pairs between their forward and backward passes."""
    return peak_activations(schedule_of(cfg, enough_microbatches(cfg)))
