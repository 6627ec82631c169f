"""Sums over a log interval: when to log, what the losses were since, how long it took."""

from dataclasses import dataclass, field
from typing import Any

from megatron.training.exits.conditions import is_log_iteration
from megatron.training.observe.metrics import StepMetrics, materialize, train_record
from megatron.training.train_state import TrainState


@dataclass(frozen=True)
class Step:
    """One iteration and the counters right after it."""

    iteration: int
    consumed_samples: int
    metrics: StepMetrics

    @property
    def record(self) -> dict[str, Any]:
        """Its record in ``metrics.jsonl``; the values must have been read."""
        return train_record(self.iteration, self.consumed_samples, self.metrics)


@dataclass(frozen=True)
class IntervalSummary:
    """The iterations since the last log point, all values read."""

    steps: list[Step]
    losses: dict[str, float]
    """Means over the iterations that were not skipped; empty if all were."""
    num_skipped: int
    num_nan: int
    elapsed: float
    """Seconds of all of them."""
    flops: float
    """Model FLOPs of all of them, over all ranks."""
    skipped_samples: int
    """Skipped samples of the whole run."""

    @property
    def last(self) -> StepMetrics:
        return self.steps[-1].metrics

    @property
    def iteration(self) -> int:
        return self.steps[-1].iteration

    @property
    def consumed_samples(self) -> int:
        return self.steps[-1].consumed_samples

    @property
    def elapsed_per_iteration(self) -> float:
        return self.elapsed / len(self.steps)

    @property
    def num_tokens(self) -> float:
        return sum(float(step.metrics.num_tokens) for step in self.steps)


@dataclass
class Interval:
    """Collects iterations until a log point: every ``log_interval``, and the first iteration of a process."""

    log_interval: int
    steps: list[Step] = field(default_factory=list)
    _num_shown: int = 0
    _first_iteration: int = 1
    _flops: float = 0.0

    def start(self, state: TrainState) -> None:
        """Begin at the counters of ``state``."""
        self.steps, self._num_shown = [], 0
        self._first_iteration = state.iteration + 1
        self._flops = state.floating_point_operations

    def add(self, state: TrainState, metrics: StepMetrics) -> bool:
        """Take one iteration; whether it is a log point."""
        self.steps.append(Step(state.iteration, state.consumed_train_samples, metrics))
        return is_log_iteration(self.log_interval, state.iteration, self._first_iteration)

    def unseen(self) -> list[Step]:
        """The iterations that this method has not returned before, values read."""
        steps = self.steps[self._num_shown :]
        self._num_shown = len(self.steps)
        materialize(step.metrics for step in steps)
        return [step for step in steps if not step.metrics.invalid]

    def close(self, state: TrainState) -> IntervalSummary | None:
        """The summary of what was collected and seen, None if that is nothing; the next interval begins."""
        steps = [step for step in self.steps if not step.metrics.invalid]
        self.steps, self._num_shown = [], 0
        if not steps:
            return None
        flops = state.floating_point_operations - self._flops
        self._flops = state.floating_point_operations
        return IntervalSummary(
            steps=steps,
            losses=mean_losses(steps),
            num_skipped=sum(step.metrics.skipped for step in steps),
            num_nan=sum(step.metrics.nan for step in steps),
            elapsed=sum(step.metrics.elapsed for step in steps),
            flops=flops,
            skipped_samples=state.skipped_train_samples,
        )


def mean_losses(steps: list[Step]) -> dict[str, float]:
    """Mean of each loss over the iterations that report it and were not skipped."""
    values: dict[str, list] = {}
    for step in steps:
        if not step.metrics.skipped:
            for name, value in step.metrics.losses.items():
                values.setdefault(name, []).append(value)
    return {name: sum(losses) / len(losses) for name, losses in values.items()}
