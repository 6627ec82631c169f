"""Write ``metrics.jsonl`` and ``timing.jsonl``. The metrics recorder runs before all other sinks."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.interval import IntervalSummary, Step
from megatron.training.hooks.timing import Clock
from megatron.training.observe.metrics import EvalResult, MetricsFile, eval_record
from megatron.training.train_state import TrainState


class MetricsRecorder(Hook):
    """Writes one record per iteration and per evaluated data set."""

    def __init__(self, file: MetricsFile, trains: bool = True):
        """``trains``: False with --skip-train, which appends its evaluation and removes no records."""
        self.file, self.trains = file, trains

    def on_train_start(self, run: RunInfo) -> None:
        if self.trains:
            self.file.resume(run.state.iteration)

    def on_steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.file.append(step.record)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        self.file.flush()

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        for result in results:
            self.file.append(eval_record(state.iteration, state.consumed_train_samples, result))
        self.file.flush(durable=True)

    def on_save(self, state: TrainState) -> None:
        self.file.flush(durable=True)

    def on_train_end(self, state: TrainState) -> None:
        self.file.flush(durable=True)


class TimingRecorder(Hook):
    """Writes one record of time and memory per log point; must run after :class:`TimersHook`."""

    def __init__(self, file: MetricsFile, clock: Clock, trains: bool = True):
        self.file, self.clock, self.trains = file, clock, trains

    def on_train_start(self, run: RunInfo) -> None:
        if self.trains:
            self.file.resume(run.state.iteration)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        self.file.append(self.clock.record(summary))
        self.file.flush()

    def on_save_timed(self, record: Mapping[str, Any]) -> None:
        self.file.append(record)
        self.file.flush()

    def on_train_end(self, state: TrainState) -> None:
        self.file.flush()
