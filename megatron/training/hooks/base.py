"""Base class of observers of the training loop. Hooks never change the run; without any, training is the same."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.hooks.interval import Interval, IntervalSummary, Step
from megatron.training.observe.metrics import EvalResult, StepMetrics
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


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

    only_for: str = ""
    """The flag that asked for a hook whose failure never ends a run, such as that of a writer whose disk is full: it is
    left alone from then on, with one warning. Empty: errors are errors."""

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
        """After that checkpoint is complete; ``state`` as it holds it, iterations later where it was written in the
        background."""

    def on_save_wait(self, iteration: int) -> None:
        """Before training waits for the checkpoint of ``iteration``, which is written in the background."""

    def on_save_timed(self, record: Mapping[str, Any]) -> None:
        """After :meth:`on_saved`: the record of ``timing.jsonl``."""

    def on_train_end(self, state: TrainState) -> None:
        """Last call, also when training ends by an error: flush and close."""


class Hooks(Hook):
    """All hooks of a rank as one, and the log interval that they share."""

    def __init__(self, log_interval: int, hooks: Sequence[Hook]) -> None:
        self.hooks, self.interval = list(hooks), Interval(log_interval)
        # where no hook looks at values, none is read from the device
        self._reads = any(
            type(hook).on_steps is not Hook.on_steps or type(hook).on_log is not Hook.on_log for hook in hooks
        )

    def on_train_start(self, run: RunInfo) -> None:
        self.interval.start(run.state)
        self._tell_all("on_train_start", run)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        is_log_point = self._reads and self.interval.add(state, metrics)
        steps = self.interval.unseen() if is_log_point else []
        summary = self.interval.close(state) if is_log_point else None
        for hook in list(self.hooks):
            self._tell(hook, "on_step", state, metrics)
            if summary is not None:
                self._tell(hook, "on_steps", steps)
                self._tell(hook, "on_log", state, summary)

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        self._show_steps()
        self._tell_all("on_evaluate", state, results)

    def on_save(self, state: TrainState) -> None:
        self._show_steps()
        self._tell_all("on_save", state)

    def on_saved(self, state: TrainState) -> None:
        self._tell_all("on_saved", state)

    def on_save_wait(self, iteration: int) -> None:
        self._tell_all("on_save_wait", iteration)

    def on_save_timed(self, record: Mapping[str, Any]) -> None:
        self._tell_all("on_save_timed", record)

    def on_train_end(self, state: TrainState) -> None:
        try:
            self._show_steps()  # reads the device, which an error may have left unreadable
        finally:
            self._tell_all("on_train_end", state)

    def _show_steps(self) -> None:
        if steps := self.interval.unseen():
            self._tell_all("on_steps", steps)

    def _tell_all(self, event: str, *arguments: Any) -> None:
        for hook in list(self.hooks):
            self._tell(hook, event, *arguments)

    def _tell(self, hook: Hook, event: str, *arguments: Any) -> None:
        if hook not in self.hooks:
            return
        try:
            getattr(hook, event)(*arguments)
        except Exception as error:  # whatever a third-party writer raises: training does not depend on it
            if not hook.only_for:
                raise
            self.hooks.remove(hook)
            logger.warning(
                "%s: %s: %s. Training goes on without it; metrics.jsonl keeps the values",
                hook.only_for, type(error).__name__, error,
            )  # fmt: skip
