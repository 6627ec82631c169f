"""Base class of observers of the training loop. Hooks never change the run; without any, training is the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.hooks.interval import Interval, IntervalSummary, Step
from megatron.training.observe.metrics import EvalResult, StepMetrics
from megatron.training.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run and this process, as hooks see them."""

    state: TrainState
    """The live counters; at the start, those of the checkpoint that was loaded."""
    train_iters: int
    rank: int = 0
    world_size: int = 1
    data_parallel_rank: int = 0
    device: str = "cpu"
    """Type of the device that trains, "cpu" or "cuda"."""
    device_name: str = "CPU"
    """As ``torch.cuda.get_device_name()`` says; the key of the table of peaks."""

    @property
    def is_log_rank(self) -> bool:
        """The last rank logs: it is the one that holds the loss under pipeline parallelism."""
        return self.rank == self.world_size - 1


class Hook:
    """The calls of the loop, in their order. Each does nothing unless a hook says otherwise."""

    reads_metrics = False
    """Whether this hook has :meth:`on_steps` or :meth:`on_log`: where none has, no value is read from the device."""

    def on_train_start(self, run: RunInfo) -> None:
        """Once, after a checkpoint was loaded and before the first iteration."""

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        """After each iteration; ``state`` already counts it."""

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Iterations with their values read, each once and in order: at log points, and before the calls below."""

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        """At each log point, behind :meth:`on_steps`: all iterations since the last one."""

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        """After each evaluation, all of its data sets at once."""

    def on_save(self, state: TrainState) -> None:
        """Just *before* the checkpoint of ``state.iteration`` is written, so that what was logged outlives it."""

    def on_saved(self, state: TrainState) -> None:
        """After that checkpoint is complete."""

    def on_train_end(self, state: TrainState) -> None:
        """Last call, also when training ends by an error: flush and close."""


class Hooks(Hook):
    """All hooks of a rank as one, and the log interval that they share."""

    def __init__(self, log_interval: int, hooks: Sequence[Hook]) -> None:
        self.hooks, self.interval = list(hooks), Interval(log_interval)
        self.reads_metrics = any(hook.reads_metrics for hook in hooks)

    def on_train_start(self, run: RunInfo) -> None:
        self.interval.start(run.state)
        for hook in self.hooks:
            hook.on_train_start(run)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        steps: Sequence[Step] = ()
        summary = None
        if self.reads_metrics and self.interval.add(state, metrics):
            steps, summary = self.interval.unseen(), self.interval.close(state)
        for hook in self.hooks:
            hook.on_step(state, metrics)
            if summary is not None:
                hook.on_steps(steps)
                hook.on_log(state, summary)

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        self._show_steps()
        for hook in self.hooks:
            hook.on_evaluate(state, results)

    def on_save(self, state: TrainState) -> None:
        self._show_steps()
        for hook in self.hooks:
            hook.on_save(state)

    def on_saved(self, state: TrainState) -> None:
        for hook in self.hooks:
            hook.on_saved(state)

    def on_train_end(self, state: TrainState) -> None:
        self._show_steps()
        for hook in self.hooks:
            hook.on_train_end(state)

    def _show_steps(self) -> None:
        if steps := self.interval.unseen():
            for hook in self.hooks:
                hook.on_steps(steps)
