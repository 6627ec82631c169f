"""Verify a parallel layout: run the same few steps on many ranks and on one, and compare all values.

:func:`trace` runs the real program (``build_components``, ``Trainer.train_step``) on the current ranks and yields, for
every step, the losses, the gradient norm, and gradient and new value of every parameter as rectangles of its global
tensor. A single rank's traces form the :class:`Reference`. Each rank of a layout compares its rectangles with it
(:func:`compare`), and :func:`judge` combines the ranks' reports: every element of every tensor must exist exactly once,
replicas must be bit-identical, and all values must be within a relative tolerance.

The error of a tensor is its largest absolute difference over the largest magnitude of the reference tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.core.distributed.replicas import tensor_hash
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer.optimizer import Update
from megatron.core.sharding.rectangles import Rectangle, coverage_problem
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors
from megatron.core.tokenizers.simple import NullTokenizer
from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.datasets import NumSamples
from megatron.training.run import build_components
from megatron.training.step import TrainStep
from megatron.training.tasks.base import Task
from megatron.training.tasks.language_model import LanguageModelTask, RandomSamples

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


MAX_DRAWS = 100


class SyntheticSamples(RandomSamples):
    """Random samples of a task. Every third one is fully masked if a global batch has at least 2 samples; all others
    have tokens that contribute to the loss, so that every global batch does."""

    def __getitem__(self, index: int) -> dict[str, object]:
        for seed in range(self.first + index, self.first + index + MAX_DRAWS * self.length, self.length):
            sample = self.task.random_sample(np.random.default_rng(seed))
            if np.any(np.asarray(sample["loss_mask"])):
                break
        if index % 3 == 1 and self.task.cfg.training.global_batch_size > 1:
            sample["loss_mask"] = np.zeros_like(sample["loss_mask"])
        return sample


def with_synthetic_data(task_class: type[LanguageModelTask], vocab_size: int) -> type[LanguageModelTask]:
    """Return a subclass of ``task_class`` that trains on :class:`SyntheticSamples`, with the fixed ``vocab_size`` and
    random text lengths, without text and files. It has no validation and test data."""

    class OnSyntheticData(task_class):  # type: ignore[misc, valid-type]
        def __init__(self, cfg: PretrainConfig) -> None:
            super().__init__(cfg, NullTokenizer(vocab_size))  # frozen models read its vocabulary

        @property
        def vocab_size(self) -> int:
            return vocab_size

        def random_length(self, generator: np.random.Generator, max_length: int) -> int:
            return int(generator.integers(max_length // 4, max_length + 1))  # ensures padding in every batch

        def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[object, object, object]:
            return SyntheticSamples(self, 1 << 20), None, None

    return OnSyntheticData


class Trace(NamedTuple):
    """One step on one rank; step 0 is the state before training and has only weights."""

    step: int
    losses: dict[str, float]
    """Losses and module statistics, such as expert load."""
    norm: float | None
    gradients: list[ShardedTensor]
    weights: list[ShardedTensor]


def trace(
    cfg: PretrainConfig, make_task: Callable[[PretrainConfig], Task], groups: ProcessGroups, steps: int
) -> Iterator[Trace]:
    """Build the run's components, train ``steps`` steps on the ranks of ``groups`` and yield a trace per step, after
    one of the initial weights. Collective. Gradients are this rank's reduced shards. Weights are live tensors, and the
    list of gradients is reused: read both before the next step."""
    parts = build_components(cfg, make_task(cfg), groups)
    gradients: list[ShardedTensor] = []
    update = parts.optimizer.update

    def noting_update(skip_update: Tensor | None = None) -> Update:
        gradients[:] = [_copy(shard) for shard in parts.optimizer.gradient_shards()]
        return update(skip_update)

    parts.optimizer.update = noting_update  # type: ignore[method-assign]
    train_step = TrainStep(cfg, parts)
    yield Trace(0, {}, None, [], weight_shards(parts))
    for step in range(1, steps + 1):
        metrics = train_step.run()
        losses = {name: float(value) for name, value in {**metrics.losses, **metrics.statistics}.items()}
        norm = None if metrics.grad_norm is None else float(metrics.grad_norm)
        yield Trace(step, losses, norm, gradients, weight_shards(parts))


def _copy(shard: ShardedTensor) -> ShardedTensor:
    return ShardedTensor(shard.name, shard.local.detach().clone(), shard.global_shape, shard.offsets)


def weight_shards(parts: Components) -> list[ShardedTensor]:
    """Return this rank's weights as rectangles of global tensors (no copies)."""
    weights: list[ShardedTensor] = []
    for chunk in parts.checkpointer.chunks:
        weights += module_tensors(chunk, groups=parts.groups).values()
    return weights


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the single-rank run, with full tensors by global name."""

    losses: dict[str, float]
    norm: float | None
    tensors: dict[str, dict[str, Tensor]]
    """Kind (``gradient``, ``weight``) -> name -> tensor."""


Reference = list[ReferenceStep]


def build_reference(traces: Iterable[Trace]) -> Reference:
    """Consume the traces of a single-rank run and return one ReferenceStep per trace, with clones of all gradients and
    weights by name. Runs the training steps if ``traces`` is a generator."""
    steps = []
    for one in traces:
        kinds = {"gradient": one.gradients, "weight": one.weights}
        tensors = {kind: {shard.name: _copy(shard).local for shard in shards} for kind, shards in kinds.items()}
        steps.append(ReferenceStep(one.losses, one.norm, tensors))
    return steps


class Compared(NamedTuple):
    """Comparison of one rectangle of one tensor on one rank."""

    kind: str
    name: str
    rectangle: Rectangle
    error: float
    digest: int


class StepReport(NamedTuple):
    """One rank's comparison of one step."""

    losses: dict[str, float]
    norm: float | None
    cells: list[Compared]


def compare(one: Trace, reference: ReferenceStep) -> StepReport:
    """Compare this rank's gradient and weight rectangles with the same rectangles of the reference. Return all errors;
    a tensor that is missing or has another shape has infinite error. Also hashes each rectangle."""
    cells = []
    for kind, shards in (("gradient", one.gradients), ("weight", one.weights)):
        for shard in shards:
            full = reference.tensors[kind].get(shard.name)
            error = math.inf
            if full is not None and tuple(full.shape) == tuple(shard.global_shape):
                error = _error(shard, full, reference.norm)
            cells.append(Compared(kind, shard.name, shard.rectangle, error, int(tensor_hash(shard.local))))
    return StepReport(one.losses, one.norm, cells)


def _error(shard: ShardedTensor, full: Tensor, norm: float | None) -> float:
    """Return the largest absolute difference over the full tensor's largest magnitude, or over the gradient norm (else
    1) if that is all-zero. 0 for an empty shard, infinity for NaN."""
    local = shard.local.detach()
    if local.numel() == 0:
        return 0.0
    difference = float((local - shard.rectangle.of(full).to(local.device)).abs().max())
    scale = float(full.abs().max()) or norm or 1.0
    return difference / scale if math.isfinite(difference) else math.inf


class Difference(NamedTuple):
    """One difference from the single-rank run."""

    step: int
    kind: str
    name: str
    error: float
    """Relative; infinite for missing tensors, other shapes and NaN."""
    detail: str = ""

    def __str__(self) -> str:
        where = "before training" if self.step == 0 else f"step {self.step}"
        what = self.name if self.kind in ("loss", "norm") else f"{self.kind} of {self.name}"
        return f"{where}: {what} {self.detail or f'differs by {self.error:.1e} (relative)'}"


@dataclass
class Verdict:
    """Result of the comparison of a layout."""

    differences: list[Difference] = field(default_factory=list)
    """Differences beyond the tolerance: by step, then loss, gradients, norm, weights, each in model order."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Per step: loss, reference loss, norm, reference norm, worst gradient and weight as (error, name)."""

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """First difference, or None."""
        return self.differences[0] if self.differences else None


def judge(reference: Reference, reports: Sequence[Sequence[StepReport]], tolerance: float) -> Verdict:
    """Combine all ranks' reports (``reports[rank][step]``) into one verdict. Losses and norms must agree on every rank,
    tensors be covered exactly once, and weight replicas be bit-identical. ``tolerance`` is relative, 0 in step 0."""
    verdict = Verdict()
    for step, expected in enumerate(reference):
        ranks = [report[step] for report in reports]
        limit = tolerance if step else 0.0  # initial weights must be bit-identical
        loss = _scalars(step, "loss", expected.losses, [report.losses for report in ranks], limit)
        norms = [{} if report.norm is None else {"gradient norm": report.norm} for report in ranks]
        norm = _scalars(step, "norm", {} if expected.norm is None else {"gradient norm": expected.norm}, norms, limit)
        worst: dict[str, tuple[float, str]] = {}
        by_kind: dict[str, list[Difference]] = {}
        for kind, tensors in expected.tensors.items():
            cells = [cell for report in ranks for cell in report.cells if cell.kind == kind]
            by_kind[kind], worst[kind] = _tensors(step, kind, tensors, cells, limit)
        verdict.differences += [*loss, *by_kind["gradient"], *norm, *by_kind["weight"]]
        if step:
            row = {"step": step, "losses": ranks[0].losses, "reference losses": expected.losses}
            verdict.rows.append(row | {"norm": ranks[0].norm, "reference norm": expected.norm, **worst})
    return verdict


def _scalars(
    step: int, kind: str, expected: dict[str, float], scalars: Sequence[dict[str, float]], limit: float
) -> list[Difference]:
    """A rank with other names than expected gives one infinite difference; NaN always differs."""
    differences = []
    for rank, values in enumerate(scalars):
        if set(values) != set(expected):
            detail = f"is {sorted(values)} on rank {rank}, expected {sorted(expected)}"
            differences.append(Difference(step, kind, kind, math.inf, detail))
            continue
        for name, value in values.items():
            error = abs(value - expected[name]) / (abs(expected[name]) or 1.0)
            if not error <= limit:
                detail = f"is {value!r} on rank {rank}, {expected[name]!r} on one rank"
                differences.append(Difference(step, kind, name, error, detail))
    return differences


def _tensors(
    step: int, kind: str, expected: dict[str, Tensor], cells: Sequence[Compared], limit: float
) -> tuple[list[Difference], tuple[float, str]]:
    """Return (differences, (largest error, its name)). The rectangles of all ranks must cover a tensor exactly once,
    replicas of weights have equal digests, each ``cell.error`` be at most ``limit`` (no cell: inf)."""
    by_name: dict[str, list[Compared]] = {name: [] for name in expected}
    for cell in cells:
        by_name.setdefault(cell.name, []).append(cell)
    differences: list[Difference] = []
    worst = (0.0, "")
    for name, local in by_name.items():
        if name not in expected:
            differences.append(Difference(step, kind, name, math.inf, "does not exist on one rank"))
            continue
        problem = coverage_problem(expected[name].shape, {cell.rectangle for cell in local})
        problem = f"is not there exactly once: the ranks {problem}" if problem else ""
        if not problem and kind == "weight":
            problem = disagreement(local)
        if problem:
            differences.append(Difference(step, kind, name, math.inf, problem))
        error = max((cell.error for cell in local), default=math.inf)
        worst = max(worst, (error, name))
        if not error <= limit:
            differences.append(Difference(step, kind, name, error))
    return differences, worst


def disagreement(cells: Iterable[Compared]) -> str:
    """Return a message if replicas of a rectangle differ in any bit, else an empty string."""
    digests: dict[Rectangle, set[int]] = {}
    for cell in cells:
        digests.setdefault(cell.rectangle, set()).add(cell.digest)
    apart = [rectangle for rectangle, values in digests.items() if len(values) > 1]
    return f"differs between the ranks that hold copies of it (at offsets {apart[0].offsets})" if apart else ""
