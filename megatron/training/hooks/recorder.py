"""Writes ``metrics.jsonl`` and ``timing.jsonl``. Comes before every other sink, so that the truth is there first."""

from collections.abc import Sequence

from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.interval import Interval, IntervalSummary
from megatron.training.hooks.timing import Clock
from megatron.training.observe.metrics import EvalResult, MetricsFile, StepMetrics, eval_record, train_record
from megatron.training.train_state import TrainState


class MetricsRecorder(Hook):
    """One record per iteration and per evaluated data set."""

    def __init__(self, file: MetricsFile, log_interval: int, trains: bool = True):
        """``trains``: False under --skip-train, which adds its evaluation and cuts nothing."""
        self.file, self.trains = file, trains
        self.interval = Interval(log_interval)

    def on_train_start(self, run: RunInfo) -> None:
        if self.trains:
            self.file.resume(run.state.iteration)
        self.interval.start(run.state)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        self._write(self.interval.add(state, metrics))

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        self._queue(self.interval.close(state))
        for result in results:
            self.file.append(eval_record(state.iteration, state.consumed_train_samples, result))
        self.file.flush(durable=True)

    def on_save(self, state: TrainState) -> None:
        self._write(self.interval.close(state), durable=True)

    def on_train_end(self, state: TrainState) -> None:
        self._write(self.interval.close(state), durable=True)

    def _queue(self, summary: IntervalSummary | None) -> None:
        for step in summary.steps if summary else ():
            self.file.append(train_record(step.iteration, step.consumed_samples, step.metrics))

    def _write(self, summary: IntervalSummary | None, durable: bool = False) -> None:
        self._queue(summary)
        self.file.flush(durable)


class TimingRecorder(Hook):
    """One record per log point with what the clock and the memory say; comes after :class:`TimersHook`."""

    def __init__(self, file: MetricsFile, log_interval: int, clock: Clock, trains: bool = True):
        self.file, self.clock, self.trains = file, clock, trains
        self.interval = Interval(log_interval)

    def on_train_start(self, run: RunInfo) -> None:
        if self.trains:
            self.file.resume(run.state.iteration)
        self.interval.start(run.state)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        summary = self.interval.add(state, metrics)
        if summary is not None:
            self.file.append(self.clock.record(summary))
            self.file.flush()

    def on_train_end(self, state: TrainState) -> None:
        self.file.flush()
