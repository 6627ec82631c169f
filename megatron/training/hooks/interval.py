"""Log interval: collect iterations between log points and summarize losses and time."""

from dataclasses import dataclass, field

from megatron.training.exits.conditions import is_log_iteration
from megatron.training.observe.metrics import Record, StepMetrics, materialize, train_record
from megatron.training.train_state import TrainState


@dataclass(frozen=True)
class Step:
    """One iteration, with the counters after it."""

    iteration: int
    consumed_samples: int
    metrics: StepMetrics

    @property
    def record(self) -> Record:
        """Record for ``metrics.jsonl``; the values must have been materialized."""
        return train_record(self.iteration, self.consumed_samples, self.metrics)


@dataclass(frozen=True)
class IntervalSummary:
    """Iterations since the last log point, with materialized values."""

    steps: list[Step]
    losses: dict[str, float]
    """Means over iterations that were not skipped; empty if all were."""
    num_skipped: int
    num_nan: int
    elapsed: float
    """Total seconds of all iterations."""
    flops: float
    """Model FLOPs of all iterations, summed over ranks."""
    skipped_samples: int
    """Skipped samples since the start of the run."""

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

    def close(self, state: TrainState) -> IntervalSummary | None:
        """Return the summary of the interval's iterations: mean losses, counts of skipped and NaN iterations, seconds,
        FLOPs. Returns None if no iteration is valid. Start the next interval in both cases. Call `unseen` first."""
        steps, self.steps = self.steps, []
        flops = state.floating_point_operations - self._flops
        self._flops = state.floating_point_operations
        if not steps:
            return None
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
    """Return the unweighted mean of each loss over the iterations that report it and were not skipped. A loss that no
    such iteration reports is absent."""
    values: dict[str, list[float]] = {}
    for step in steps:
        if not step.metrics.skipped:
            for name, value in step.metrics.losses.items():
                values.setdefault(name, []).append(float(value))
    return {name: sum(losses) / len(losses) for name, losses in values.items()}
