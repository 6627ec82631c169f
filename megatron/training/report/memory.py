"""Memory estimate per pipeline rank for a training step, from the settings only. Torch-free.

Weights, gradients and optimizer state are exact: parameters of the model description per stage, cut into buckets and
shards by the same functions as the real buffers. Activations are estimated: bytes that autograd saves according to the
description, times the micro-batches in flight, plus the temporary memory of one layer's backward pass.

Operations are those used on GPUs; plain torch on CPUs saves up to a fifth more between the attention projections. Not
included: overhead of allocator, kernels and communication libraries, and fragmentation (some GB on a GPU)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.core.config.fp8 import experts_in_fp8
from megatron.core.config.memory import IN_FLIGHT, LOADED_AHEAD
from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.config.muon import MUON_OPTIMIZERS, is_hidden_matrix
from megatron.core.description.model import ModelDescription, Param, Piece, kept_bytes
from megatron.core.description.parts import activation_bytes, stream_elements
from megatron.core.pipeline_parallel.simulate import peak_activations
from megatron.core.pipeline_parallel.stages import StageContents
from megatron.core.sharding.buffer_layout import (
    NUM_SLOTS,
    CutRule,
    chosen_bucket_size,
    cut_buffer,
    owned_elements,
    slot_bytes,
)
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.variable_lengths import token_limit
from megatron.training.report.pipeline import enough_microbatches, layers_held, run_schedule, run_stages, stage_pieces


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank: maximum over its data- and tensor-parallel ranks."""

    contents: str
    weights: int
    gradients: int
    optimizer: int
    """Optimizer state, or with --optimizer-cpu-offload the part on the device with the buffers for transfers."""
    activations: int
    """Saved between forward and backward passes, at the peak."""
    working: int
    """Temporary memory on top: gradients of one layer's activations, weights gathered for a layer."""
    kinds: dict[str, int]
    """``activations`` by the name of the piece that saves them, largest first."""
    host_optimizer: int = 0
    """Optimizer state in host memory; not in ``total``."""
    host_activations: int = 0
    """Offloaded activations in host memory at the peak; not in ``total``."""
    frozen: int = 0
    """Bytes of ``weights`` that belong to frozen models next to the trained one."""

    def with_frozen(self, weights: int, working: int) -> RankMemory:
        """Return a copy with a frozen model's ``weights`` and temporary memory."""
        return replace(
            self, weights=self.weights + weights, working=self.working + working, frozen=self.frozen + weights
        )

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def estimate_memory(cfg: PretrainConfig, vocab_size: int, model: ModelDescription | None = None) -> list[RankMemory]:
    """Return the memory of each pipeline rank. ``vocab_size`` is unpadded; 0 means unknown and adds no bytes.
    ``model``: the description of ``cfg``, if the caller has it."""
    ranks, model = cfg.model.pipeline_model_parallel_size, model or cfg.describe(vocab_size)
    stages = run_stages(cfg, vocab_size or None, model)
    schedule = run_schedule(cfg, enough_microbatches(cfg))
    # once per stage: a schedule has thousands of actions
    saved, host = (
        peak_activations(schedule, weight=[float(size(cfg, model, stage)) for stage in stages].__getitem__)
        for size in (stage_activations, offloaded_activations)
    )
    trained = (_rank_memory(cfg, model, stages[rank::ranks], int(saved[rank])) for rank in range(ranks))
    memories = [replace(memory, host_activations=int(size)) for memory, size in zip(trained, host)]
    for companion, description in zip(cfg.companions.values(), model.companions):
        added = _companion_memory(companion, vocab_size, description)
        memories = [memory.with_frozen(*sizes) for memory, sizes in zip(memories, added)]
    return memories


def _companion_memory(cfg: PretrainConfig, vocab_size: int, model: ModelDescription) -> Iterator[tuple[int, int]]:
    """Yield for each pipeline rank the bytes of the weights of the frozen ``model`` of ``cfg``, and of its temporary
    memory: gathered weights, and the activations of one piece, since nothing is saved for a backward pass."""
    stages = run_stages(cfg, vocab_size or None, model)
    ranks = cfg.model.pipeline_model_parallel_size
    for rank in range(ranks):
        states = [_sharded_state(cfg, model, stage) for stage in stages[rank::ranks]]
        pieces = (piece for stage in stages[rank::ranks] for piece in stage_pieces(model, stage))
        largest = max((kept_bytes([piece]) for piece in pieces), default=0.0)
        yield sum(state[0] for state in states), sum(state[3] for state in states) + int(largest * _tokens(cfg))


def _rank_memory(
    cfg: PretrainConfig, model: ModelDescription, chunks: Sequence[StageContents], saved: int
) -> RankMemory:
    """``saved``: peak of saved activations in bytes, divided among kinds in proportion to one micro-batch of each
    chunk. Working memory is summed over chunks, plus the largest backward pass."""
    states = [_chunk_state(cfg, model, chunk) for chunk in chunks]
    weights, gradients, optimizer, working = (sum(column) for column in zip(*states))
    working += max(_backward_bytes(cfg, layers_held(model, chunk)) for chunk in chunks)
    working += max(_moving_bytes(cfg, layers_held(model, chunk)) for chunk in chunks)
    by_kind: dict[str, float] = defaultdict(float)
    for chunk in chunks:
        for name, size in activations_by_kind(cfg, model, chunk).items():
            by_kind[name] += size
    share = saved / (sum(by_kind.values()) or 1.0)  # micro-batches in flight, averaged over the chunks
    kinds = {name: round(by_kind[name] * share) for name in sorted(by_kind, key=by_kind.__getitem__, reverse=True)}
    host, slots = _offloaded_state(cfg, model, chunks, optimizer)
    optimizer += slots - host
    return RankMemory("; ".join(map(str, chunks)), weights, gradients, optimizer, saved, working, kinds, host)


# ---- parameters


class Stored(NamedTuple):
    """Shape of a parameter, or a component of it, on this tensor-parallel rank."""

    param: Param
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def stored_parameters(cfg: PretrainConfig, pieces: Sequence[Piece]) -> list[Stored]:
    """Return the parameters of ``pieces`` with their shapes on a tensor- and expert-parallel rank, in build order,
    without tied copies; a parameter of several components gives one entry each."""
    params = [param for piece in pieces for param in piece.params]
    tp, ep = cfg.model.tensor_model_parallel_size, cfg.model.expert_model_parallel_size
    sizes = {"tp": tp, "ep": ep, "etp": expert_tensor_ranks(cfg.model)}
    names = {param.name for param in params}
    untied = [param for param in params if param.tied_to == param.name or param.tied_to not in names]
    return [Stored(param, shape) for param in untied for shape in param.local_shapes(sizes)]


# ---- weights, gradients, optimizer state


def _chunk_state(cfg: PretrainConfig, model: ModelDescription, stage: StageContents) -> tuple[int, int, int, int]:
    """Return bytes of (weights with their fp8 copies, gradients, optimizer state, working memory) of one stage. Working
    memory: gathered weights plus unreduced gradients of one unit of FSDP."""
    weights, gradients, optimizer, working = _sharded_state(cfg, model, stage)
    if cfg.model.fp8 is not None and not cfg.distributed.use_torch_fsdp2:
        dense, of_experts = _fp8_copies(cfg, model, stage)
        shards = _sum_ranks(cfg) // cfg.distributed.num_distributed_optimizer_instances
        weights += of_experts + dense
        if cfg.model.fp8_param_gather:  # a rank keeps only its shard of the bf16 values
            values = dense if cfg.model.fp8_weight_transpose_cache else 2 * dense
            weights -= values - values // shards
    return weights, gradients, optimizer, working


def _fp8_copies(cfg: PretrainConfig, model: ModelDescription, stage: StageContents) -> tuple[int, int]:
    """Return the bytes of the fp8 copies, one or two, of every weight of a stage's dense layers and experts."""
    number = 2 if cfg.model.fp8_weight_transpose_cache else 1
    branches = [branch for layer in layers_held(model, stage) for branch in layer]
    experts = [branch for branch in branches if any(param.is_expert for param in branch.params)]
    dense = [branch for branch in branches if branch not in experts]
    copies = number * sum(out * into for branch in dense for op in branch.ops if op.gemm for out, into in [op.gemm])
    if not experts_in_fp8(cfg.model):
        return copies, 0
    stored = stored_parameters(cfg, experts)
    return copies, number * sum(
        parameter.elements for parameter in stored if parameter.param.is_expert and parameter.param.ndim == 2
    )


def _sharded_state(cfg: PretrainConfig, model: ModelDescription, stage: StageContents) -> tuple[int, int, int, int]:
    """Return :func:`_chunk_state` without fp8 copies. Experts with another reduction group have separate buffers."""
    parameters = stored_parameters(cfg, stage_pieces(model, stage))
    if parameters and cfg.distributed.use_torch_fsdp2 and _sum_ranks(cfg) > 1:
        return _fully_sharded_state(cfg, parameters, layers_held(model, stage))
    frozen = sum(stored.elements for stored in parameters if stored.param.frozen) * activation_bytes(cfg.model)
    trained = [stored for stored in parameters if not stored.param.frozen]
    weights, gradients, optimizer = _trained_state(cfg, model, trained) if trained else (0, 0, 0)
    return frozen + weights, gradients, optimizer, 0


def _trained_state(cfg: PretrainConfig, model: ModelDescription, parameters: list[Stored]) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer state of parameters in gradient buffers."""
    # parameters that are reduced over other ranks (experts) have separate buffers
    ranks = _sum_ranks(cfg), _expert_sum_ranks(cfg)
    if ranks[0] == ranks[1] and cfg.model.expert_model_parallel_size == 1:
        weights, gradients, shards = _buffer_state(cfg, model, parameters, ranks[0])
        return weights, gradients, max(shards)
    kinds = ([parameter for parameter in parameters if parameter.param.is_expert is expert] for expert in (False, True))
    dense, experts = (_buffer_state(cfg, model, kind, size) for kind, size in zip(kinds, ranks))
    tp, of_experts = cfg.model.tensor_model_parallel_size, expert_tensor_ranks(cfg.model)
    of_experts *= cfg.model.expert_model_parallel_size
    shards = [
        dense[2][rank // tp % len(dense[2])] + experts[2][rank // of_experts % len(experts[2])]
        for rank in range(tp * ranks[0])
    ]
    return dense[0] + experts[0], dense[1] + experts[1], max(shards)


def _buffer_state(
    cfg: PretrainConfig, model: ModelDescription, parameters: list[Stored], num_ranks: int
) -> tuple[int, int, list[int]]:
    """Return bytes of weights, gradients and optimizer state per shard. Matrices that Muon updates are separate."""
    if not parameters:
        return 0, 0, [0]
    kinds = ([parameter for parameter in parameters if _is_matrix(cfg, parameter) is kind] for kind in (False, True))
    states = [_one_buffer_state(cfg, model, kind, num_ranks) for kind in kinds if kind]
    weights, gradients, optimizer = zip(*states)
    return sum(weights), sum(gradients), [*map(sum, zip(*optimizer))]


def _is_matrix(cfg: PretrainConfig, stored: Stored) -> bool:
    return cfg.optimizer.optimizer in MUON_OPTIMIZERS and is_hidden_matrix(stored.param.name, len(stored.shape))


def _one_buffer_state(
    cfg: PretrainConfig, model: ModelDescription, parameters: list[Stored], num_ranks: int
) -> tuple[int, int, list[int]]:
    """Gradients have bucket padding, optimizer state is per shard. Reverses the list ``parameters`` in place."""
    distributed = cfg.distributed
    full = _is_matrix(cfg, parameters[0])
    parameters.reverse()
    sizes = [parameter.elements for parameter in parameters]
    shards = (
        num_ranks // distributed.num_distributed_optimizer_instances if distributed.use_distributed_optimizer else 1
    )
    # parameters tied between first and last stage get separate buckets, so that both stages cut equal shards
    tied = cfg.model.pipeline_model_parallel_size > 1 and distributed.use_distributed_optimizer
    held_twice = model.embedding.params if model.predictions else model.embedding.params[:1]
    separate = [
        tied and (parameter.param.tied_to is not None or parameter.param in held_twice) for parameter in parameters
    ]
    bucket_size = chosen_bucket_size(
        sum(sizes),
        bucket_size=distributed.ddp_bucket_size,
        num_buckets=distributed.ddp_num_buckets,
        overlap=distributed.overlap_grad_reduce,
        num_ranks=num_ranks,
    )
    rule = CutRule(shards, distributed.ddp_pad_buckets_for_high_nccl_busbw, full=full)
    cut = cut_buffer(sizes, separate, bucket_size, rule)
    elements = cut.total if distributed.use_distributed_optimizer else sum(sizes)
    updated = owned_elements(sizes, cut, shards) if distributed.use_distributed_optimizer else [sum(sizes)]
    width = moment_bytes(cfg, full) + master_bytes(cfg)
    optimizer = [count * width for count in updated]
    return elements * activation_bytes(cfg.model), cut.total * gradient_bytes(cfg), optimizer


def _fully_sharded_state(
    cfg: PretrainConfig, parameters: Sequence[Stored], layers: Sequence[Sequence[Piece]]
) -> tuple[int, int, int, int]:
    """Working memory: gathered layers, parameters outside of layers and the largest unreduced gradients."""
    shards = _sum_ranks(cfg) // cfg.distributed.num_distributed_optimizer_instances
    sizes = [-(-parameter.shape[0] // shards) * math.prod(parameter.shape[1:]) for parameter in parameters]
    trained = [(size, parameter) for size, parameter in zip(sizes, parameters) if not parameter.param.frozen]
    moments = sum(size * moment_bytes(cfg, _is_matrix(cfg, parameter)) for size, parameter in trained)
    units = [sum(parameter.elements for parameter in stored_parameters(cfg, layer)) for layer in layers]
    outside = sum(parameter.elements for parameter in parameters) - sum(units)
    # the next layer is gathered while the current one computes
    together = 2 if cfg.distributed.torch_fsdp2_reshard_after_forward else len(units)
    gathered = outside + sum(sorted(units)[-together:])
    item, rows = activation_bytes(cfg.model), sum(size for size, _ in trained)
    unsummed = int(max([outside, *units]) * rows / sum(sizes))
    weights = rows * state_bytes(cfg) + (sum(sizes) - rows) * item
    return weights, rows * state_bytes(cfg), moments, gathered * item + unsummed * gradient_bytes(cfg)


def _sum_ranks(cfg: PretrainConfig) -> int:
    return cfg.data_parallel_size * cfg.model.context_parallel_size


def _expert_sum_ranks(cfg: PretrainConfig) -> int:
    copy_ranks = (
        cfg.model.expert_model_parallel_size * expert_tensor_ranks(cfg.model) * cfg.model.pipeline_model_parallel_size
    )
    return max(cfg.world_size // copy_ranks, 1)


def _offloaded_state(
    cfg: PretrainConfig, model: ModelDescription, chunks: Sequence[StageContents], optimizer: int
) -> tuple[int, int]:
    """Return (bytes of state in host memory, bytes of the device buffers)."""
    if not cfg.optimizer.optimizer_cpu_offload:
        return 0, 0
    host = int(optimizer * cfg.optimizer.optimizer_offload_fraction)
    stored = [parameter for chunk in chunks for parameter in stored_parameters(cfg, stage_pieces(model, chunk))]
    width = moment_bytes(cfg, is_matrix=True) + master_bytes(cfg)
    largest = max((parameter.elements * width for parameter in stored if _is_matrix(cfg, parameter)), default=0)
    return host, NUM_SLOTS * slot_bytes(host, min(largest, host))


def _is_half(cfg: PretrainConfig) -> bool:
    return cfg.model.fp16 or cfg.model.bf16


def state_bytes(cfg: PretrainConfig) -> int:
    """Return the bytes per element of full-precision moments."""
    return 8 if cfg.model.fp64 else 4


def gradient_bytes(cfg: PretrainConfig) -> int:
    """Return the bytes per element of accumulated gradients."""
    return 4 if _is_half(cfg) and cfg.optimizer.accumulate_allreduce_grads_in_fp32 else activation_bytes(cfg.model)


def master_bytes(cfg: PretrainConfig) -> int:
    """Return the extra bytes per half-precision weight for its master: 2 for bf16 remainders, 4 for an fp32 copy."""
    return 2 if cfg.model.bf16 and cfg.optimizer.store_param_remainders else 4 if _is_half(cfg) else 0


def moment_bytes(cfg: PretrainConfig, is_matrix: bool = False) -> int:
    """Return the bytes of all moments per parameter element; ``is_matrix``: of matrices that Muon updates."""
    kind = cfg.optimizer.optimizer
    if is_matrix and kind == "adaptive_muon":
        return 2 * state_bytes(cfg)
    if kind in MUON_OPTIMIZERS:
        kind = cfg.optimizer.muon_scalar_optimizer
    if is_matrix or kind == "lion":
        return state_bytes(cfg)
    if kind == "sgd":
        return state_bytes(cfg) if cfg.optimizer.sgd_momentum else 0
    return sum(
        2 if kind == "bf16" and not cfg.model.fp64 else state_bytes(cfg)
        for kind in (cfg.optimizer.exp_avg_dtype, cfg.optimizer.exp_avg_sq_dtype)
    )


# ---- activations


def _tokens(cfg: PretrainConfig) -> int:
    """Return the tokens of one micro-batch on this context-parallel rank; of samples of different lengths the most."""
    if cfg.variable_lengths.use_varlen_dataset:
        return token_limit(cfg)
    return cfg.data.seq_length // cfg.model.context_parallel_size * cfg.training.micro_batch_size


def _recomputed(cfg: PretrainConfig) -> frozenset[str]:
    selective = cfg.model.recompute_granularity == "selective"
    return frozenset(cfg.model.recompute_modules or ("core_attn",)) if selective else frozenset()


def stage_activations(cfg: PretrainConfig, model: ModelDescription, stage: StageContents) -> int:
    """Return the bytes that one micro-batch keeps on a stage between its forward and its backward pass."""
    return int(sum(activations_by_kind(cfg, model, stage).values()))


LAYER_INPUTS = "inputs of recomputed layers"


def activations_by_kind(cfg: PretrainConfig, model: ModelDescription, stage: StageContents) -> dict[str, float]:
    """Return the bytes of :func:`stage_activations` for one micro-batch by the name of the piece that saves them. Fully
    recomputed layers count by their inputs, as :data:`LAYER_INPUTS`. Omits zero entries."""
    layers, recomputed = layers_held(model, stage), _recomputed(cfg)
    full = cfg.model.recompute_granularity == "full"
    by_kind: dict[str, float] = defaultdict(float)
    for end in [model.embedding] * stage.embedding + [model.head] * stage.loss:
        by_kind[end.name] += kept_bytes([end])
    for piece in model.predictions:
        if stage.num_mtp and not (full and piece.is_branch):
            by_kind[piece.name] += kept_bytes([piece], recomputed)
    if full:
        assert cfg.model.recompute_num_layers is not None
        recomputed_layers = min(cfg.model.recompute_num_layers, len(layers))
        inputs = (
            -(-len(layers) // recomputed_layers)
            if layers and cfg.model.recompute_method == "uniform"
            else recomputed_layers
        )
        share = cfg.model.tensor_model_parallel_size if cfg.model.distribute_saved_activations else 1
        by_kind[LAYER_INPUTS] += inputs * stream_elements(cfg.model) * activation_bytes(cfg.model) / share
        layers = [] if cfg.model.recompute_method == "uniform" else layers[recomputed_layers:]
    for layer in layers:
        for branch in layer:
            by_kind[branch.name] += kept_bytes([branch], recomputed) - _offloaded_bytes(cfg, branch)
    return {name: size * _tokens(cfg) for name, size in by_kind.items() if size}


def _offloaded_bytes(cfg: PretrainConfig, branch: Piece) -> float:
    """Return bytes per token."""
    model, recomputed = cfg.model, _recomputed(cfg)
    if not model.fine_grained_activation_offloading:
        return 0.0
    least = model.min_offloaded_tensor_size * activation_bytes(model) / _tokens(cfg)
    saved = [
        tensor for op in branch.ops for tensor in op.saved if set(tensor.offload) & set(model.offload_modules or ())
    ]
    return model.activation_offload_fraction * sum(
        tensor.bytes for tensor in saved if tensor.bytes >= least and not recomputed.intersection(tensor.modules)
    )


def offloaded_activations(cfg: PretrainConfig, model: ModelDescription, stage: StageContents) -> int:
    """Return the bytes that one micro-batch keeps in host memory for a stage."""
    branches = [branch for layer in layers_held(model, stage) for branch in layer]
    return int(sum(_offloaded_bytes(cfg, branch) for branch in branches) * _tokens(cfg))


def _moving_bytes(cfg: PretrainConfig, layers: Sequence[Sequence[Piece]]) -> int:
    """Return the bytes of offloaded activations on the device whose copies are in flight."""
    modules = len(cfg.model.offload_modules or ()) or 1
    largest = max((sum(_offloaded_bytes(cfg, branch) for branch in layer) for layer in layers), default=0.0)
    return int(largest * min((IN_FLIGHT + LOADED_AHEAD) / modules, len(layers)) * _tokens(cfg))


def _backward_bytes(cfg: PretrainConfig, layers: Sequence[Sequence[Piece]]) -> int:
    """Return the temporary bytes of one layer's backward pass on one micro-batch: gradients of the largest branch, two
    residual streams, and activations of a fully recomputed group."""
    if not layers:
        return 0
    recomputed = _recomputed(cfg)
    total = max(_branch_gradients(branch, recomputed) for layer in layers for branch in layer)
    total += 2 * stream_elements(cfg.model) * activation_bytes(cfg.model)
    if cfg.model.recompute_granularity == "full":
        together = cfg.model.recompute_num_layers if cfg.model.recompute_method == "uniform" else 1
        assert together is not None
        total += max(
            sum(map(kept_bytes, layers[first : first + together])) for first in range(0, len(layers), together)
        )
    return int(total * _tokens(cfg))


def _branch_gradients(branch: Piece, recomputed: frozenset[str]) -> float:
    """Return bytes per token: sum over ops of max(output gradient, recomputed activations)."""
    total = 0.0
    for op in branch.ops:
        back = sum(saved.bytes for saved in op.saved if recomputed.intersection(saved.modules))
        total += max(op.gradients, back)
    return total


# ---- the table


def memory_rows(cfg: PretrainConfig, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yield a header, GiB per pipeline rank by kind with a mark at the maximum, and the micro-batches in flight.
    ``vocab_size`` 0 means unknown and adds no bytes."""
    ranks = estimate_memory(cfg, vocab_size)
    precision = "fp16" if cfg.model.fp16 else "bf16" if cfg.model.bf16 else "fp32"
    columns = ("weights", "gradients", "optimizer", "activations", "working", "total")
    yield "GiB per rank", "".join(f"{name:>13}" for name in columns) + f"   ({precision})"
    totals = [memory.total for memory in ranks]
    for index, memory in enumerate(ranks):
        cells = "".join(f"{getattr(memory, name) / 2**30:13.2f}" for name in columns)
        mark = "   <- the most" if len(ranks) > 1 and index == totals.index(max(totals)) else ""
        yield f"  pipeline rank {index}" if len(ranks) > 1 else "  every rank", cells + mark
    if cfg.companions:
        yield (
            "  of weights: frozen models",
            f"at most {max(memory.frozen for memory in ranks) / 2**30:.2f} GiB per rank",
        )
    yield from _host_rows(ranks)
    live = microbatches_alive(cfg)
    yield "  alive at most", f"{', '.join(f'{count:g}' for count in live)} micro-batches x chunks by pipeline rank"


HOST_GB_PER_SECOND = 55.0
"""Speed of copies between a GPU and pinned host memory in each direction (PCIe 5 x16)."""


def _host_rows(ranks: Sequence[RankMemory]) -> Iterator[tuple[str, str]]:
    """Copies of activations at the peak, once per micro-batch in flight."""
    sizes = {
        "optimizer state, copied in {} per step": max(rank.host_optimizer for rank in ranks),
        "activations, copied in {}": max(rank.host_activations for rank in ranks),
    }
    parts = [
        f"{size / 2**30:.2f} GiB of {text.format(f'{size / HOST_GB_PER_SECOND / 1e9:.2g} s')}"
        for text, size in sizes.items()
        if size
    ]
    if parts:
        rate = f"at {HOST_GB_PER_SECOND:g} GB/s in each direction"
        yield "  host memory per rank", f"{'; '.join(parts)} ({rate})"


def microbatches_alive(cfg: PretrainConfig) -> list[float]:
    """Return the maximum number of (chunk, micro-batch) pairs between forward and backward, per pipeline rank."""
    return peak_activations(run_schedule(cfg, enough_microbatches(cfg)))
