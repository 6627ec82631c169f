"""Predicted time of a training step, folded over the model description. Torch-free.

Each operation gets seconds for F (forward), I (input gradients) and W (weight gradients) by its kind: GEMMs by FLOPs
with tile quantization, attention by FLOPs and keys per query, other operations by bytes. Communication inside a layer
is added where it is not hidden. The pipeline simulator combines F, I and W of the stages; optimizer and data-parallel
collectives follow. ``calibration.tsv`` holds measured over predicted time by kind of model; one factor per kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from megatron.core.attention.description import in_blocks, unfused_traffic
from megatron.core.config.fp8 import experts_in_fp8
from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.config.muon import MUON_OPTIMIZERS, is_hidden_matrix
from megatron.core.description.model import ModelDescription, Op, Param, Piece
from megatron.core.description.parts import activation_bytes
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.simulate import Timeline, simulate
from megatron.core.pipeline_parallel.stages import StageContents
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.memory import gradient_bytes, master_bytes, moment_bytes, stored_parameters
from megatron.training.report.pipeline import (
    batch_seconds,
    count_microbatches,
    run_schedule,
    run_stages,
    stage_pieces,
)
from megatron.training.report.plan.cluster import Cluster, Gpu, table
from megatron.training.report.rates import model_kind

Key = TypeVar("Key")


class Seconds(dict[Key, float]):
    """Sums of seconds; 0 for other keys."""

    def __missing__(self, key: Key) -> float:
        return 0.0

    def add(self, other: Mapping[Key, float]) -> None:
        """Add the seconds of ``other``."""
        for key, seconds in other.items():
            self[key] += seconds


Times = Seconds[tuple[str, str]]
"""(phase, part) -> seconds; phases F, I and W."""

NUM_SMS, TILE = 132, (128, 256)
HALF_K = 48
"""Prologue and epilogue of a GEMM tile, in elements of the inner dim."""
HALF_KEYS = (400, 450)
"""Keys per query at which attention forward and backward reach half of their rate."""
GROUPED = 0.92
"""Rate of grouped GEMMs relative to single ones."""
LAUNCH = 40e-6
"""Host time of one kernel of a layer, in seconds (GPT-345M without CUDA graphs)."""
LAUNCHES = {"layer": 53, "bidirectional": 19, "fp8": 18, "experts": 113, "all-to-all": 105}
"""Kernels of a layer's forward and backward pass, and additions to them, counted in profiles of measured rows."""
KERNEL = 3e-6
"""Shortest duration of a kernel, launch included, in seconds."""
ROW_COUNTS = 2.2e-3
"""Idle time of the device in a layer with experts, forward and backward, in seconds: the host reads row counts for the
all-to-all, and the queue of the device runs empty (Qwen3-30B shape on two GPUs, compared with --moe-static-rows)."""
RECURRENCE = 0.1
"""Rate of recurrences in chunks relative to GEMMs, in FLOPs of the recurrence token by token. Not measured: chosen such
that linear attention with published kernels takes a quarter of its layer."""
FP32_GEMM = 0.068
"""Rate of fp32 GEMMs without tensor cores relative to bf16 (H100: 67 of 989 TFLOP/s)."""
MASK_KERNELS = 230
"""Kernels that generate the dropout mask of one head of unfused attention."""
HOST_LINK = 55e9
"""Bytes per second between a GPU and host memory, in each direction."""
OTHER = 0.01
"""Elementwise kernels, copies and gaps, relative to compute."""
TP_EXPOSED = {False: 0.85, True: 0.33}
"""Share of the tensor-parallel collectives that is not hidden, by --tp-comm-overlap."""
RING_SLOWDOWN, A2A_SLOWDOWN = 2.0, 1.6
"""Context-parallel messages overlapped with attention, relative to an idle link."""


@dataclass(frozen=True)
class StepTime:
    """Prediction for one full global batch."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds on the slowest stage by part; they add up to ``seconds``."""
    bubble: float
    """Idle share of the pipeline, 0 to 1."""

    @property
    def exposed(self) -> float:
        """Seconds of communication that is not hidden."""
        return sum(size for name, size in self.parts.items() if name.endswith("communication"))


@cache
def calibration() -> dict[str, float]:
    """Return measured over predicted time by kind of model."""
    return {kind: float(factor) for kind, factor, *_ in table("calibration.tsv")}


def calibration_kinds(cfg: PretrainConfig, gpu: Gpu) -> list[str]:
    """Return the kinds of models whose measured rows calibrate this run, the most similar first."""
    kind = model_kind(cfg) + (", ep" if cfg.model.expert_model_parallel_size > 1 else "")
    return [f"{kind} on {gpu.name}", kind, kind.partition(", fp8")[0], "dense"]


def calibration_factor(cfg: PretrainConfig, gpu: Gpu, factors: Mapping[str, float]) -> float:
    """Return measured over predicted time of the most similar kind of model in ``factors``; 1 without one."""
    return next((factors[key] for key in calibration_kinds(cfg, gpu) if key in factors), 1.0)


def predict_step(
    cfg: PretrainConfig,
    cluster: Cluster,
    vocab_size: int,
    factors: Mapping[str, float] | None = None,
    *,
    rough: bool = False,
    model: ModelDescription | None = None,
) -> StepTime:
    """Predict one step of a resolved configuration. ``factors`` replaces the packaged calibration. ``rough`` replaces
    the simulation of the pipeline by a closed form. ``model``: the description of ``cfg``, if the caller has it."""
    model = model or cfg.describe(vocab_size)
    stages = run_stages(cfg, vocab_size or None, model)
    factor = calibration_factor(cfg, cluster.gpu, calibration() if factors is None else factors)
    costs = [stage_times(cfg, model, stage, cluster, factor) for stage in stages]
    companions = list(cfg.companions.values()) or [cfg] * len(model.companions)  # else the base of adapters
    for companion, frozen in zip(companions, model.companions):
        for cost, stage in zip(costs, run_stages(companion, vocab_size or None, frozen)):
            times = stage_times(companion, frozen, stage, cluster, factor, phases="F")
            cost["F", "frozen models"] += sum(times.values())
    duration, bubble = _pipeline(cfg, costs, cluster, rough)
    number, ranks = count_microbatches(cfg), cfg.model.pipeline_model_parallel_size
    parts: Seconds[str] = Seconds()
    for rank in range(ranks):  # the average rank: its busy time and the bubble add up to the duration
        for cost in costs[rank::ranks]:
            for (_, part), seconds in cost.items():
                parts[part] += seconds * number / ranks
    parts["bubble"] = max(duration - sum(parts.values()), 0.0)
    after = [_after_backward(cfg, model, stages[rank::ranks], cluster, costs[rank]) for rank in range(ranks)]
    parts.add(max(after, key=lambda times: sum(times.values())))
    return StepTime(sum(parts.values()), dict(parts), bubble)


# ---- compute


def _tokens(cfg: PretrainConfig) -> float:
    return cfg.data.seq_length * cfg.training.micro_batch_size / cfg.model.context_parallel_size


def gemm_seconds(gpu: Gpu, rate: float, sizes: tuple[float, float, float], groups: float = 1.0, item: int = 2) -> float:
    """Return the seconds of ``groups`` GEMMs of sizes (m, n, k): FLOPs at ``rate`` TFLOP/s, tiles rounded up to full
    waves of SMs, at least the time of its bytes."""
    m, n, k = sizes
    tiles = min(math.ceil(m / a) * math.ceil(n / b) for a, b in (TILE, TILE[::-1])) * groups
    full = tiles * TILE[0] * TILE[1] / (m * n * groups)  # work on padding of tiles
    waves = tiles / NUM_SMS
    # persistent kernels split the last wave: half of the quantization remains
    quantized = full * (1 + 0.5 * (math.ceil(waves) / waves - 1))
    seconds = 2 * m * n * k * groups * quantized * (1 + HALF_K / k) / (rate * 1e12)
    return max(seconds, item * groups * (m * n + n * k + m * k) / (gpu.memory_rate * 1e12)) + KERNEL


def _gemm(cfg: PretrainConfig, op: Op, gpu: Gpu, experts: bool, head: bool) -> Times:
    """Rows per expert are balanced. Frozen weights have no gradients."""
    assert op.gemm is not None
    (n, k), model = op.gemm, cfg.model
    rows = op.flops / cfg.data.seq_length * _tokens(cfg) / (2.0 * n * k * model.tensor_model_parallel_size)
    groups, rate, wgrad = 1.0, gpu.gemm, gpu.wgrad
    if experts and op.name != "router" and model.num_moe_experts:
        groups = model.num_moe_experts / model.expert_model_parallel_size
        rows, rate, wgrad = rows / groups, rate * GROUPED, wgrad * GROUPED
    times: Times = Seconds()
    in_fp8 = model.fp8 is not None and not head and (not experts or experts_in_fp8(model)) and op.name != "router"
    if in_fp8:  # cast of input and output gradient, both orientations, and their maximum
        rate = wgrad = gpu.fp8 * (0.82 if model.fp8_recipe == "blockwise" else 1.0)
        width = 8.0 if model.fp8_recipe == "blockwise" else 6.0
        times["F", "memory-bound"] = rows * groups * k * width / (gpu.memory_rate * 1e12)
        times["I", "memory-bound"] = rows * groups * n * width / (gpu.memory_rate * 1e12)
        if not model.fp8_weight_transpose_cache:  # read and written once per micro-batch, 1 byte each
            times["I", "memory-bound"] += 2.0 * n * k * groups / (gpu.memory_rate * 1e12)
    item = 1 if in_fp8 else activation_bytes(model)
    for phase, speed, sizes in (("F", rate, (rows, n, k)), ("I", rate, (rows, k, n)), ("W", wgrad, (n, k, rows))):
        if phase != "W" or op.backward == 2:
            times[phase, "GEMM"] = gemm_seconds(gpu, speed, sizes, groups, item)
    return times


def _unfused_attention(cfg: PretrainConfig, op: Op, gpu: Gpu) -> Times:
    """GEMMs of all computed pairs and the traffic of the operations between them; a dropout mask takes at least the
    time of its kernels. Key blocks are computed in fp32."""
    model, tokens, blocks = cfg.model, _tokens(cfg), in_blocks(cfg.model)
    traffic = unfused_traffic(model)
    heads = model.num_attention_heads / model.tensor_model_parallel_size
    gemm = 4.0 * (model.kv_channels or 1) * op.traffic / sum(traffic) * tokens / (gpu.gemm * 1e12)
    if blocks:
        gemm /= FP32_GEMM
    tiles = 2 * model.context_parallel_size + 1 if blocks else 1
    launches = heads * cfg.training.micro_batch_size * tiles * MASK_KERNELS * KERNEL if model.attention_dropout else 0.0
    seconds = [op.traffic * share / sum(traffic) * tokens / (gpu.memory_rate * 1e12) for share in traffic]
    return Seconds(
        {
            ("F", "attention"): KERNEL + gemm + max(seconds[0], launches),
            ("I", "attention"): KERNEL + (2.5 if blocks else 2) * gemm + max(seconds[1], launches if blocks else 0.0),
        }
    )


def _attention(cfg: PretrainConfig, op: Op, gpu: Gpu) -> Times:
    """Two GEMMs forward, five backward."""
    if op.traffic:
        return _unfused_attention(cfg, op, gpu)
    flops = op.flops * _tokens(cfg) / cfg.data.seq_length / cfg.model.tensor_model_parallel_size
    channels = cfg.model.num_attention_heads * (cfg.model.kv_channels or 1)
    keys = op.keys or op.flops / (4.0 * cfg.data.seq_length * channels)
    forward, backward = (1 + half / max(keys, 1.0) for half in HALF_KEYS)
    return Seconds(
        {
            ("F", "attention"): KERNEL + flops * forward / (gpu.attention_forward * 1e12),
            ("I", "attention"): KERNEL + 2.5 * flops * backward / (gpu.attention_backward * 1e12),
        }
    )


def _recurrence(cfg: PretrainConfig, op: Op, gpu: Gpu) -> Times:
    """The longer of compute and memory traffic in each direction."""
    flops = op.flops * _tokens(cfg) / cfg.data.seq_length / cfg.model.tensor_model_parallel_size
    compute, memory = flops / (RECURRENCE * gpu.gemm * 1e12), op.traffic * _tokens(cfg) / (gpu.memory_rate * 1e12)
    return Seconds(
        {
            ("F", "recurrence"): KERNEL + max(compute, 0.4 * memory),
            ("I", "recurrence"): KERNEL + max(2.5 * compute, 0.6 * memory),
        }
    )


def piece_times(cfg: PretrainConfig, piece: Piece, gpu: Gpu, *, head: bool = False, layer: bool = True) -> Times:
    """Return the compute times of a piece for one micro-batch on one rank, with its recomputed operations."""
    total: Times = Seconds()
    model, full = cfg.model, cfg.model.recompute_granularity == "full" and layer
    modules = set(model.recompute_modules or ("core_attn",)) if model.recompute_granularity == "selective" else set()
    experts = _has_experts(piece) or piece.name == "experts"
    for op in piece.ops:
        if op.kind == "gemm" and op.gemm:
            times = _gemm(cfg, op, gpu, experts, head)
        elif op.kind == "attention":
            times = _attention(cfg, op, gpu)
        elif op.kind == "recurrence":
            times = _recurrence(cfg, op, gpu)
        else:
            seconds = op.traffic * _tokens(cfg) / (gpu.memory_rate * 1e12)
            floor = KERNEL * (op.traffic > 0)
            times = Seconds(
                {("F", "memory-bound"): floor + 0.4 * seconds, ("I", "memory-bound"): floor + 0.6 * seconds}
            )
        if not op.backward:
            times = Seconds({key: seconds for key, seconds in times.items() if key[0] == "F"})
        recomputed = any(modules.intersection(saved.modules) for saved in op.saved) and op.kind != "gemm"
        if full or recomputed:
            for (phase, _), seconds in list(times.items()):
                if phase == "F":
                    times["I", "recomputation"] += seconds
        total.add(times)
    for phase in "FIW":
        busy = sum(seconds for (part, _), seconds in total.items() if part == phase)
        total[phase, "other"] += OTHER * busy
    return total


# ---- communication in layers


def _layer_communication(cfg: PretrainConfig, piece: Piece, cluster: Cluster, attention: float) -> Times:
    """Return the exposed collectives of a residual branch; ``attention``: seconds of attention."""
    model = cfg.model
    times: Times = Seconds()
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    stream = _tokens(cfg) * model.hidden_size * activation_bytes(model)
    if tp > 1:
        if model.sequence_parallel:
            one = cluster.collective(stream, tp, 1)
            forward, backward = 2 * one, 3 * one
        else:
            forward = backward = cluster.collective(stream, tp, 1, "all_reduce")
        share = TP_EXPOSED[bool(model.tp_comm_overlap)]
        times["F", "tensor communication"] = share * forward
        times["I", "tensor communication"] = share * backward
    if cp > 1 and any(op.kind == "attention" for op in piece.ops):
        times.add(_context_communication(cfg, cluster, attention))
    if model.expert_model_parallel_size > 1 and _has_experts(piece):
        times.add(_expert_communication(cfg, cluster, stream / (tp if model.sequence_parallel else 1)))
    return times


def _context_communication(cfg: PretrainConfig, cluster: Cluster, attention: float) -> Times:
    """Exposed times of keys and values (ring, all-gather) or heads (all-to-all)."""
    model = cfg.model
    tp, cp, width = model.tensor_model_parallel_size, model.context_parallel_size, model.kv_channels or 1
    groups = max(model.num_query_groups or model.num_attention_heads, tp)
    values = _tokens(cfg) * 2 * groups * width * activation_bytes(model) / tp
    kind = model.cp_comm_type[0] if isinstance(model.cp_comm_type, (list, tuple)) else model.cp_comm_type
    if kind == "a2a":
        heads = _tokens(cfg) * 2 * model.num_attention_heads * width * activation_bytes(model) / tp + values
        one = A2A_SLOWDOWN * cluster.collective(heads, cp, tp, "all_to_all")
        return Seconds({("F", "context communication"): one, ("I", "context communication"): one})
    one = cluster.collective(values * cp, cp, tp) if kind == "allgather" else (cp - 1) * cluster.send(values, tp)
    # a ring overlaps its messages with the attention of the previous block; with more steps it waits for the slowest
    share = 1.0 if kind == "allgather" else min(1.0, 0.3 * (cp - 1))
    forward, backward = (RING_SLOWDOWN * share * one * times for times in (1, 3))
    hidden = 0.0 if cluster.gpus_per_node >= cp * tp else attention / 2  # across nodes: bandwidth, not waiting
    forward, backward = max(forward - hidden / 3.5, share * one * 0.2), max(backward - hidden, share * one * 0.6)
    return Seconds({("F", "context communication"): forward, ("I", "context communication"): backward})


def _expert_communication(cfg: PretrainConfig, cluster: Cluster, stream: float) -> Times:
    """Dispatch and combination, each once forward and once backward."""
    model = cfg.model
    ep, stride = model.expert_model_parallel_size, expert_tensor_ranks(model)
    if model.moe_token_dispatcher_type == "allgather":
        one = cluster.collective(stream * ep, ep, stride)
    else:
        one = cluster.collective(stream * model.moe_router_topk, ep, stride, "all_to_all")
    return Seconds({("F", "expert communication"): 2 * one, ("I", "expert communication"): 2 * one})


# ---- stages


def stage_times(
    cfg: PretrainConfig,
    model: ModelDescription,
    stage: StageContents,
    cluster: Cluster,
    factor: float = 1.0,
    phases: str = "FIW",
) -> Times:
    """Return the times of ``phases`` of one micro-batch on a stage, with device times multiplied by ``factor``. A stage
    is at least as slow as the host starts its kernels: a third in F, the others in I."""
    pieces = stage_pieces(model, stage)
    times = summed_times(cfg, model, pieces, cluster)
    if cfg.distributed.use_torch_fsdp2:
        _add_fsdp(cfg, model, stage, cluster, times)
    times = Seconds({key: seconds * factor for key, seconds in times.items() if key[0] in phases})
    if _reads_row_counts(cfg):
        experts = sum(map(_has_experts, pieces))
        for phase in set("FI").intersection(phases):
            times[phase, "host"] += experts * ROW_COUNTS / 2
    graphs = cfg.training.cuda_graph_impl not in (None, "none")
    shares = {phase: share for phase, share in (("F", 1 / 3), ("I", 2 / 3)) if phase in phases}
    missing = _launch_seconds(cfg, pieces) - sum(times.values()) / sum(shares.values())
    if not graphs and missing > 0:
        for phase, share in shares.items():
            times[phase, "host"] += missing * share
    return times


def _launch_seconds(cfg: PretrainConfig, pieces: Sequence[Piece]) -> float:
    """Return the seconds in which the host starts the kernels of the layers, without CUDA graphs."""
    kinds = ["layer", *["bidirectional"] * (not cfg.family.is_causal), *["fp8"] * (cfg.model.fp8 is not None)]
    launches = sum(LAUNCHES[kind] for kind in kinds) / 2 * sum(piece.is_branch for piece in pieces)
    kinds = ["experts", *["all-to-all"] * _reads_row_counts(cfg)]
    return LAUNCH * (launches + sum(LAUNCHES[kind] for kind in kinds) * sum(map(_has_experts, pieces)))


def _has_experts(piece: Piece) -> bool:
    return any(param.is_expert for param in piece.params)


def _reads_row_counts(cfg: PretrainConfig) -> bool:
    model = cfg.model
    return (
        model.expert_model_parallel_size > 1
        and model.moe_token_dispatcher_type != "allgather"
        and not model.moe_pad_expert_input_to_capacity
    )


def summed_times(cfg: PretrainConfig, model: ModelDescription, pieces: Sequence[Piece], cluster: Cluster) -> Times:
    """Return the compute and exposed collectives of ``pieces`` for one micro-batch; equal pieces are computed once."""
    total: Times = Seconds()
    by_shape: dict[object, Times] = {}
    for piece in pieces:
        key = (piece.name, tuple((op.name, op.flops, op.backward, op.gemm, op.traffic) for op in piece.ops))
        if key not in by_shape:
            outside = piece is model.head or piece is model.embedding  # without fp8
            times = piece_times(cfg, piece, cluster.gpu, head=outside, layer=piece.is_branch)
            attention = sum(seconds for (_, part), seconds in times.items() if part == "attention")
            if piece.is_branch:
                times.add(_layer_communication(cfg, piece, cluster, attention))
            by_shape[key] = times
        total.add(by_shape[key])
    return total


def _add_fsdp(
    cfg: PretrainConfig, model: ModelDescription, stage: StageContents, cluster: Cluster, times: Times
) -> None:
    """Add the gathers of weights and the reduction of gradients beyond what a micro-batch hides."""
    stored = stored_parameters(cfg, stage_pieces(model, stage))
    elements = sum(parameter.elements for parameter in stored)
    trained = sum(parameter.elements for parameter in stored if not parameter.param.frozen)
    ranks, stride = _data_ranks(cfg)
    gathers = 2 if cfg.distributed.torch_fsdp2_reshard_after_forward else 1
    gather = cluster.collective(elements * activation_bytes(cfg.model), ranks, stride)
    reduce = cluster.collective(trained * gradient_bytes(cfg), ranks, stride)
    busy = {phase: sum(value for (part, _), value in times.items() if part in phase) for phase in ("F", "IW")}
    times["F", "data communication"] += max(gather - 0.9 * busy["F"], 0.05 * gather)
    backward = (gathers - 1) * gather + reduce
    times["I", "data communication"] += max(backward - 0.9 * busy["IW"], 0.05 * backward)


def _pipeline(cfg: PretrainConfig, costs: Sequence[Times], cluster: Cluster, rough: bool) -> tuple[float, float]:
    """Return (seconds, idle share), by simulation.
    ``rough``: (p - 1) / v micro-batches of the slowest rank are idle; with zero-bubble schedules a third of it."""
    number, ranks = count_microbatches(cfg), cfg.model.pipeline_model_parallel_size
    phases = [{phase: sum(v for (part, _), v in cost.items() if part == phase) for phase in "FIW"} for cost in costs]
    if ranks == 1:
        return number * sum(sum(phase_times.values()) for phase_times in phases), 0.0
    if rough:
        busy = sum(sum(phase_times.values()) for phase_times in phases) * number / ranks
        slowest = max(sum(sum(phase_times.values()) for phase_times in phases[rank::ranks]) for rank in range(ranks))
        idle = (ranks - 1) / (len(phases) // ranks) / (3 if cfg.model.pipeline_schedule else 1)
        seconds = slowest * (number + idle)
        return seconds, 1 - busy / seconds
    message = _tokens(cfg) * cfg.model.hidden_size * activation_bytes(cfg.model)
    if cfg.model.sequence_parallel:
        message /= cfg.model.tensor_model_parallel_size
    latency = cluster.send(message, cfg.world_size // ranks)

    def timeline(microbatches: int) -> Timeline:
        schedule = run_schedule(cfg, microbatches)
        joint = not schedule.splits_backward

        def cost(stage: int, action: Action) -> float:
            times = phases[stage]
            if action.kind == "B":
                return times["I"] + times["W"] * joint
            return times[action.kind]

        return simulate(schedule, cost, latency=latency)

    return batch_seconds(cfg, timeline)


# ---- optimizer and data-parallel collectives


def _data_ranks(cfg: PretrainConfig) -> tuple[int, int]:
    """Return (ranks, stride) of the groups that reduce dense gradients."""
    return cfg.data_parallel_size * cfg.model.context_parallel_size, cfg.model.tensor_model_parallel_size


def _newton_schulz_flops(cfg: PretrainConfig, param: Param) -> float:
    """Per step X X^T, its square, and their product with X, for X [m, n] with m <= n: 4 m^2 n + 2 m^3."""
    m, n = sorted(param.shape[-2:])
    return cfg.optimizer.muon_num_ns_steps * math.prod(param.shape[:-2]) * (4.0 * m * m * n + 2.0 * m**3)


def _after_backward(
    cfg: PretrainConfig, model: ModelDescription, chunks: Sequence[StageContents], cluster: Cluster, cost: Times
) -> Seconds[str]:
    """Return the seconds of the optimizer and of data-parallel collectives that no forward or backward pass hides."""
    pieces = [piece for chunk in chunks for piece in stage_pieces(model, chunk)]
    stored = [parameter for parameter in stored_parameters(cfg, pieces) if not parameter.param.frozen]
    dense = sum(parameter.elements for parameter in stored if not parameter.param.is_expert)
    experts = sum(parameter.elements for parameter in stored) - dense
    ranks, stride = _data_ranks(cfg)
    expert_ranks = cfg.model.expert_model_parallel_size * expert_tensor_ranks(cfg.model)
    copies = max(cfg.world_size // (expert_ranks * cfg.model.pipeline_model_parallel_size), 1)
    distributed, fsdp = cfg.distributed, cfg.distributed.use_torch_fsdp2
    sharded = distributed.use_distributed_optimizer or fsdp
    state = master_bytes(cfg) + moment_bytes(cfg)
    moved = 2 * gradient_bytes(cfg) + 2 * state + activation_bytes(cfg.model)
    elements = dense / ranks + experts / copies if sharded else dense + experts
    seconds = Seconds({"optimizer": elements * moved / (cluster.gpu.memory_rate * 1e12) + 1e-3})
    if cfg.optimizer.optimizer in MUON_OPTIMIZERS:
        matrices = [
            parameter.param for parameter in stored if is_hidden_matrix(parameter.param.name, len(parameter.shape))
        ]
        shards = {True: expert_ranks * (copies if sharded else 1), False: stride * (ranks if sharded else 1)}
        flops = sum(_newton_schulz_flops(cfg, param) / shards[param.is_expert] for param in matrices)
        seconds["orthogonalization"] = flops / (cluster.gpu.gemm * 1e12)
    if cfg.optimizer.optimizer_cpu_offload:
        copied = elements * state * cfg.optimizer.optimizer_offload_fraction
        directions = 1 if cfg.optimizer.overlap_cpu_optimizer_d2h_h2d else 2
        seconds["copies of optimizer state"] = directions * copied / HOST_LINK
    if fsdp:
        return seconds
    first = {phase: sum(value for (part, _), value in cost.items() if part in phase) for phase in ("F", "IW")}
    reduce = gather = 0.0
    for size, group, apart in ((dense, ranks, stride), (experts, copies, expert_ranks)):
        if sharded:
            reduce += cluster.collective(size * gradient_bytes(cfg), group, apart)
            gather += cluster.collective(size * activation_bytes(cfg.model), group, apart)
        else:
            reduce += cluster.collective(size * gradient_bytes(cfg), group, apart, "all_reduce")
    # one micro-batch overlaps a collective, except its last bucket
    if distributed.overlap_grad_reduce:
        reduce = max(reduce - 0.9 * first["IW"], 0.05 * reduce)
    if distributed.overlap_param_gather:
        gather = max(gather - 0.9 * first["F"], 0.05 * gather)
    seconds["data communication"] = reduce + gather
    return seconds
