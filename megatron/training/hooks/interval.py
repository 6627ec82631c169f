"""Log interval: collect iterations between log points and summarize losses and time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.training.exits.conditions import is_log_iteration
from megatron.training.observe.metrics import Record, StepMetrics, materialize
from megatron.training.observe.step_parts import mean_parts
from megatron.training.observe.throughput import Throughput
from megatron.training.train_state import TrainState


class Step(NamedTuple):
    """One iteration, with the counters after it."""

    iteration: int
    consumed_samples: int
    metrics: StepMetrics


@dataclass
class Interval:
    """Collects iterations until a log point: every ``log_interval``, and the first iteration of a process."""

    log_interval: int
    steps: list[Step] = field(default_factory=list)
    """Valid iterations since the last log point, with materialized values."""
    _unseen: list[Step] = field(default_factory=list)
    _first_iteration: int = 1
    _flops: float = 0.0

    def start(self, state: TrainState) -> None:
        """Start a new interval at the counters of ``state``."""
        self.steps, self._unseen = [], []
        self._first_iteration = state.iteration + 1
        self._flops = state.floating_point_operations

    def add(self, state: TrainState, metrics: StepMetrics) -> bool:
        """Add one iteration; return whether it is a log point."""
        self._unseen.append(Step(state.iteration, state.consumed_train_samples, metrics))
        return is_log_iteration(self.log_interval, state.iteration, self._first_iteration)

    def unseen(self) -> list[Step]:
        """Return iterations not returned before, materialized (waits for the device) and without invalid ones."""
        steps, self._unseen = self._unseen, []
        materialize(step.metrics for step in steps)
        valid = [step for step in steps if not step.metrics.invalid]
        self.steps += valid
        return valid

    def close(self, state: TrainState, throughput: Throughput) -> Record | None:
        """Return the fields of a record of kind ``interval``; None if no iteration is valid. Start the next interval in
        both cases. Call `unseen` first."""
        steps, self.steps = self.steps, []
        flops = state.floating_point_operations - self._flops
        self._flops = state.floating_point_operations
        if not steps:
            return None
        seconds, last = sum(step.metrics.elapsed for step in steps), steps[-1].metrics
        num_tokens = sum(float(step.metrics.num_tokens) for step in steps)
        names = ("learning_rate", "global_batch_size", "loss_scale", "grad_norm", "num_zeros", "params_norm")
        return {
            "iterations": len(steps),
            "seconds": seconds,
            **throughput.rate(flops, num_tokens, seconds),
            "parts_seconds": mean_parts([step.metrics.step_marks for step in steps]),
            "losses": mean_losses(steps),
            **{name: getattr(last, name) for name in names},
            "num_skipped": sum(step.metrics.skipped for step in steps),
            "num_nan": sum(step.metrics.nan for step in steps),
            "skipped_samples": state.skipped_train_samples,
        }


def mean_losses(steps: list[Step]) -> dict[str, float]:
    """Return the unweighted mean of each loss over the iterations that report it and were not skipped. Omits others."""
    values: dict[str, list[float]] = {}
    for step in steps:
        if not step.metrics.skipped:
            for name, value in step.metrics.losses.items():
                values.setdefault(name, []).append(float(value))
    return {name: sum(losses) / len(losses) for name, losses in values.items()}
