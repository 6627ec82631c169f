"""The least time that each class of a step's work can take on rank 0, and where a measured step is above it.

GEMMs count at their separately measured rates, all other work by the bytes that a fused
implementation must move at the rate of a plain copy: each input read once, each result written once. No recomputation,
no exposed communication; a pipeline's bubble, which no kernel can remove, counts as communication, because a
waiting rank is in communication. A pure function of the configuration and ``ceilings.json``; torch-free.

Bytes per token and channel, e bytes per element:

    residual + norm   forward 4 e (branch and stream in, stream and normed out), backward 4 e
    rope              queries and keys in and out, forward and backward
    gated activation  forward 3 e per channel of its output, backward 5 e; plain ones 2 e and 3 e
    linear attention  16 e per channel of queries, keys and values: convolution 5 e, recurrence with the states of
                      chunks 8 e, vectors of length 1
    cross entropy     logits read in forward; read, and their gradient written, in backward
    Adam              gradient read twice (norm, update), both moments and the fp32 weight read and written, the latter
                      as a bf16 weight and 16 bits more
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import kernel_classes as kinds
from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.description.model import Op, Piece
from megatron.core.description.parts import activation_bytes
from megatron.training.report.pipeline import count_microbatches, run_stages, simulated_timeline, stage_pieces

CEILINGS = Path(__file__).with_name("ceilings.json")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
BACKWARD_GEMMS, FORWARD_GEMMS = 5, 2  # of attention: the scores are computed again in backward

Config = Any
"""A resolved PretrainConfig."""


@dataclass
class Work:
    """Minimum work of a class in one step on rank 0."""

    flops: float = 0.0
    bytes: float = 0.0
    ms: float = 0.0

    def add(self, *, flops: float = 0.0, bytes: float = 0.0, seconds: float = 0.0) -> None:
        self.flops += flops
        self.bytes += bytes
        self.ms += seconds * 1e3


@dataclass(frozen=True)
class Share:
    """Work of rank 0 in one step: its pieces of the model's description."""

    cfg: Config
    pieces: tuple[Piece, ...]
    microbatches: int

    @classmethod
    def of(cls, cfg: Config, vocab_size: int) -> Share:
        model = cfg.describe(vocab_size)
        stages = run_stages(cfg, vocab_size)[:: cfg.model.pipeline_model_parallel_size]
        pieces = tuple(piece for stage in stages for piece in stage_pieces(model, stage))
        return cls(cfg, pieces, count_microbatches(cfg))

    @property
    def ops(self) -> list[Op]:
        """All of them."""
        return [op for piece in self.pieces for op in piece.ops]

    @property
    def tokens(self) -> int:
        """Tokens of one step, in the GEMMs of this rank."""
        cfg = self.cfg
        return (
            cfg.data.seq_length // cfg.model.context_parallel_size * cfg.training.micro_batch_size * self.microbatches
        )

    @property
    def flops_per_op(self) -> float:
        """Factor of an operation's FLOPs (one sequence, all ranks)."""
        return self.tokens / self.cfg.data.seq_length / self.cfg.model.tensor_model_parallel_size

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return activation_bytes(self.cfg.model)

    @property
    def parameters(self) -> float:
        """Parameters on this rank, without norms and biases (a thousandth) and without tied copies."""
        cfg = self.cfg
        model = cfg.model
        tp, ep = model.tensor_model_parallel_size, model.expert_model_parallel_size
        sizes = {"tp": tp, "ep": ep, "etp": expert_tensor_ranks(model)}
        held = {each.name: each for piece in self.pieces for each in piece.params}
        matrices = [each for each in held.values() if each.tied_to not in held and len(each.shape) > 1]
        return sum(math.prod(shape) for each in matrices for shape in each.local_shapes(sizes) if shape[-1] > 1)


def weight_shapes(cfg: Config, vocab_size: int) -> set[tuple[int, int]]:
    """Return the (output, input) sizes that distinguish a trace's GEMMs."""
    return {op.gemm for op in Share.of(cfg, vocab_size).ops if op.gemm is not None}


# ---- ceilings


def load_ceilings(path: Path = CEILINGS) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def gemm_rate(ceilings: Mapping[str, Any], kind: str, out: int, into: int) -> float:
    """FLOP/s: measured for this shape, else the highest of its kind."""
    by_shape = ceilings["gemm_tflops_by_shape"].get(f"{out}x{into}", {})
    return 1e12 * by_shape.get(kind, ceilings["gemm_tflops"][kind]["highest"])


def attention_rates(ceilings: Mapping[str, Any], length: int) -> tuple[float, float]:
    """FLOP/s of attention forward and backward over ``length`` tokens, between the lengths that were measured."""
    forward = interpolate(ceilings["attention_tflops"]["forward"], length)
    both = interpolate(ceilings["attention_tflops"]["forward and backward"], length)
    total = FORWARD_GEMMS + BACKWARD_GEMMS
    backward = BACKWARD_GEMMS / (total / both - FORWARD_GEMMS / forward)
    return forward * 1e12, backward * 1e12


def interpolate(table: Mapping[str, float], length: int) -> float:
    """By the logarithm of the length; the nearest entry outside of the table."""
    points = sorted((float(key), value) for key, value in table.items())
    if length <= points[0][0]:
        return points[0][1]
    for (low, at_low), (high, at_high) in zip(points, points[1:]):
        if length <= high:
            return at_low + (at_high - at_low) * math.log(length / low) / math.log(high / low)
    return points[-1][1]


# ---- limits


def limits(cfg: Config, vocab_size: int, ceilings: Mapping[str, Any]) -> dict[str, Work]:
    """Class -> least work of one step on rank 0."""
    share = Share.of(cfg, vocab_size)
    work = {name: Work() for name in kinds.CLASSES}
    _add_gemms(work, share, ceilings)
    _add_attention(work, share, ceilings)
    bandwidth = ceilings["copy_terabytes_per_second"] * 1e12
    # of linear attention, memory takes longer: 5 times at keys and values of 128 channels
    recurrent = sum(op.flops * (1 + op.backward) for op in share.ops if op.kind == "recurrence")
    work[kinds.LINEAR_ATTENTION].add(flops=recurrent * share.flops_per_op)
    for name, size in _least_bytes(share).items():
        work[name].add(bytes=size, seconds=size / bandwidth)
    work[kinds.COMMUNICATION].add(seconds=bubble_seconds(cfg, vocab_size, sum(each.ms for each in work.values()) / 1e3))
    return work


def _add_gemms(work: dict[str, Work], share: Share, ceilings: Mapping[str, Any]) -> None:
    for kind in (kinds.GEMM_FORWARD, kinds.GEMM_DGRAD, kinds.GEMM_WGRAD):
        for op in share.ops:
            if op.gemm is not None:
                flops = op.flops * share.flops_per_op
                work[kind].add(flops=flops, seconds=flops / gemm_rate(ceilings, kind, *op.gemm))


def _add_attention(work: dict[str, Work], share: Share, ceilings: Mapping[str, Any]) -> None:
    forward = sum(op.flops for op in share.ops if op.kind == "attention") * share.flops_per_op
    names = (kinds.ATTENTION_FORWARD, FORWARD_GEMMS), (kinds.ATTENTION_BACKWARD, BACKWARD_GEMMS)
    for (name, count), rate in zip(names, attention_rates(ceilings, share.cfg.data.seq_length)):
        flops = forward * count / FORWARD_GEMMS
        work[name].add(flops=flops, seconds=flops / rate)


TRAFFIC = {
    "norm": kinds.NORM, "rotary": kinds.ROPE, "activation": kinds.ACTIVATION, "cross entropy": kinds.CROSS_ENTROPY,
    "embedding": kinds.EMBEDDING, "recurrence": kinds.LINEAR_ATTENTION,
}  # fmt: skip
"""Kinds of operations to classes of kernels."""


def _least_bytes(share: Share) -> dict[str, float]:
    cfg, found = share.cfg, dict.fromkeys(TRAFFIC.values(), 0.0)
    for op in share.ops:
        if op.kind in TRAFFIC:
            found[TRAFFIC[op.kind]] += op.traffic * share.tokens
    found[kinds.OPTIMIZER] = optimizer_bytes_per_parameter(cfg) * share.parameters / optimizer_ranks(cfg)
    return found


def optimizer_ranks(cfg: Config) -> int:
    """Return the number of ranks that shard the optimizer step."""
    shared = cfg.distributed.use_distributed_optimizer or cfg.distributed.use_torch_fsdp2
    return cfg.data_parallel_size * cfg.model.context_parallel_size if shared else 1


def optimizer_bytes_per_parameter(cfg: Config) -> float:
    """Bytes that one Adam step with clipping moves."""
    model = cfg.model
    gradient = 4 if cfg.optimizer.accumulate_allreduce_grads_in_fp32 or not (model.bf16 or model.fp16) else 2
    moments = (
        [BYTES[cfg.optimizer.exp_avg_dtype], BYTES[cfg.optimizer.exp_avg_sq_dtype]]
        if cfg.optimizer.use_precision_aware_optimizer
        else [4, 4]
    )
    if cfg.optimizer.optimizer == "muon":
        moments = [4]  # nearly all parameters are matrices
    elif cfg.optimizer.optimizer != "adam":
        moments = [4] if cfg.optimizer.sgd_momentum else []
    weight = 8 if model.bf16 or not model.fp16 else 10  # fp16: a main weight of four bytes, and a copy that is written
    return 2 * gradient + weight + 2 * sum(moments)


def bubble_seconds(cfg: Config, vocab_size: int, busy_seconds: float) -> float:
    """Return rank 0's waiting time in a pipeline with kernels at their limits and free messages."""
    if cfg.model.pipeline_model_parallel_size == 1:
        return 0.0
    timeline = simulated_timeline(cfg, count_microbatches(cfg), vocab_size)
    return busy_seconds * (timeline.duration / timeline.busy(0) - 1)


def communication_ms(cfg: Config, vocab_size: int, ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Return the time of one step's collectives on rank 0 at the measured bus bandwidths, without overlap."""
    model = cfg.model
    share, speeds = Share.of(cfg, vocab_size), ceilings["bus_gigabytes_per_second"]
    found = {}
    ranks = cfg.data_parallel_size * model.context_parallel_size
    if ranks > 1:
        part, size = (ranks - 1) / ranks, share.parameters
        gradient = 4 if cfg.optimizer.accumulate_allreduce_grads_in_fp32 else 2
        if optimizer_ranks(cfg) > 1:
            found["gradients, reduce-scatter"] = part * gradient * size / speeds["reduce_scatter"] / 1e6
            found["weights, all-gather"] = part * share.element * size / speeds["all_gather"] / 1e6
        else:
            found["gradients, all-reduce"] = 2 * part * gradient * size / speeds["all_reduce"] / 1e6
    tp = model.tensor_model_parallel_size
    if tp > 1:
        branches = sum(piece.is_branch for piece in share.pieces)
        size = share.tokens * model.hidden_size * share.element * branches * (tp - 1) / tp
        if (
            model.sequence_parallel
        ):  # qkv and fc1 gather in forward and twice in backward, proj and fc2 once in backward
            found["activations, all-gather"] = 3 * size / speeds["all_gather"] / 1e6
            found["activations, reduce-scatter"] = 2 * size / speeds["reduce_scatter"] / 1e6
        else:
            found["activations, all-reduce"] = 2 * 2 * size / speeds["all_reduce"] / 1e6
    return found


# ---- report


@dataclass
class Report:
    """Limits and measured times, in milliseconds of one step on rank 0."""

    limit: dict[str, Work]
    measured: dict[str, float] = field(default_factory=dict)
    step_ms: float | None = None

    @property
    def limit_ms(self) -> float:
        return sum(work.ms for work in self.limit.values())

    def rows(self) -> list[dict[str, Any]]:
        """By the size of the gap, largest first."""
        limit, measured = self._comparable()
        names = [*limit, *(name for name in measured if name not in limit)]
        found = []
        for name in names:
            work, took = limit.get(name, Work()), measured.get(name, 0.0)
            if work.ms or took:
                found.append({
                    "class": name, "limit_ms": work.ms, "measured_ms": took, "gap_ms": took - work.ms,
                    "tflops": work.flops / took / 1e9 if took else None,
                    "tb_per_second": work.bytes / took / 1e9 if took else None,
                })  # fmt: skip
        return sorted(found, key=lambda row: -row["gap_ms"])

    def _comparable(self) -> tuple[dict[str, Work], dict[str, float]]:
        """Return limits and times by class. If many backward GEMMs cannot be distinguished (no shapes), they form one
        class.

        Below a hundredth of the step they stay a separate class without a limit.
        """
        unknown = self.measured.get(kinds.GEMM_OTHER, 0.0)
        if unknown <= 0.01 * sum(self.measured.values()):
            return self.limit, self.measured
        parts = (kinds.GEMM_DGRAD, kinds.GEMM_WGRAD, kinds.GEMM_OTHER)
        backward = Work()
        for part in parts:
            each = self.limit.get(part, Work())
            backward.add(flops=each.flops, bytes=each.bytes, seconds=each.ms / 1e3)
        name = "GEMM backward"
        took = {name: sum(self.measured.get(part, 0.0) for part in parts)}
        return (
            {kind: work for kind, work in self.limit.items() if kind not in parts} | {name: backward},
            {kind: value for kind, value in self.measured.items() if kind not in parts} | took,
        )

    def as_dict(self) -> dict[str, Any]:
        rows = [{key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()} for row in self.rows()]
        return {"limit_ms": round(self.limit_ms, 3), "step_ms": self.step_ms, "rows": rows}

    def text(self) -> str:
        """Return a table of the gap to the limit by class."""
        lines = [f"{'class':<24}{'limit ms':>10}{'measured':>10}{'gap':>9}{'of gap':>8}{'TFLOP/s':>9}{'TB/s':>7}"]
        total = (self.step_ms or 0.0) - self.limit_ms
        for row in self.rows():
            share = f"{row['gap_ms'] / total:7.1%}" if self.step_ms and total else ""
            rate = f"{row['tflops']:9.0f}" if row["tflops"] else " " * 9
            speed = f"{row['tb_per_second']:7.2f}" if row["tb_per_second"] else ""
            lines.append(
                f"{row['class']:<24}{row['limit_ms']:10.2f}{row['measured_ms']:10.2f}{row['gap_ms']:9.2f}{share:>8}"
                f"{rate}{speed}"
            )
        step = f"{'step':<24}{self.limit_ms:10.2f}"
        lines.append(step + (f"{self.step_ms:10.2f}{total:9.2f}" if self.step_ms else ""))
        return "\n".join(lines)


def report(
    cfg: Config, vocab_size: int, ceilings: Mapping[str, Any], profile: Mapping[str, Any] | None = None
) -> Report:
    """``profile``: as of ``step_trace.Profile.as_dict``."""
    measured = dict(profile["ms"]) if profile else {}
    return Report(limits(cfg, vocab_size, ceilings), measured, profile["step_ms"] if profile else None)
