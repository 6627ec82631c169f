"""Base class of training loop hooks. Hooks only observe: training without hooks gives the same results."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.core.config.errors import UserError
from megatron.training.hooks.interval import Interval, IntervalSummary, Step
from megatron.training.observe.metrics import EvalResult, Record, Sample, StepMetrics
from megatron.training.observe.plan_comparison import Prediction
from megatron.training.observe.run_records import Ending
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Description of the run and this process for hooks."""

    state: TrainState
    """Live counters; at the start, the counters of the loaded checkpoint."""
    train_iters: int
    rank: int = 0
    world_size: int = 1
    data_parallel_rank: int = 0
    device: str = "cpu"
    """Device type of the training, "cpu" or "cuda"."""
    device_name: str = "CPU"
    """Value of ``torch.cuda.get_device_name()``, the key of the table of peaks."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that were given or differ from their defaults, as JSON types."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Versions, host and GPUs."""
    prediction: Prediction | None = None
    """Predicted step time; None on GPU kinds that the planner does not know, and on CPUs."""

    @property
    def is_log_rank(self) -> bool:
        """Whether this rank logs: the last one, because it holds the loss under pipeline parallelism."""
        return self.rank == self.world_size - 1


class Hook:
    """Callbacks of the training loop, in calling order. By default they do nothing."""

    only_for: str = ""
    """Flag that requested this hook, if its failure must not end the run (such as a writer on a full disk): the hook is
    then removed with one warning. Empty: exceptions propagate."""
    failure: str = ""
    """Description of a requested result that failed. Training continues; the run then ends with exit code 1."""

    def on_train_start(self, run: RunInfo) -> None:
        """Called once, after a checkpoint was loaded and before the first iteration."""

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        """Called after each iteration; ``state`` already includes it."""

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Called with materialized iterations, each once and in order: at log points, and before the calls below."""

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        """Called at each log point after :meth:`on_steps`, with all iterations since the last log point."""

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        """Called after each evaluation, with the results of all its data sets."""

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> None:
        """Called after the model wrote texts (--sample-prompts), with one sample per prompt."""

    def on_save(self, state: TrainState) -> None:
        """Called just *before* the checkpoint of ``state.iteration`` is written, to store log data first."""

    def on_saved(self, state: TrainState) -> None:
        """Called once that checkpoint is complete, with its ``state``; for a background save, iterations later."""

    def on_save_wait(self, iteration: int) -> None:
        """Called before training waits for the background save of ``iteration``."""

    def on_save_timed(self, record: Record) -> None:
        """Called after :meth:`on_saved` with the record for ``timing.jsonl``."""

    def on_stop(self, state: TrainState, ending: Ending, reason: str) -> None:
        """Called when training stops: with the exit condition before the final evaluation, or with an error."""

    def on_train_end(self, state: TrainState) -> None:
        """Called last, also if training ends by an error: flush and close."""


def check_methods(hooks: Sequence[Hook]) -> None:
    """Reject ``on_…`` methods that the loop never calls, such as misspelled ones (UserError)."""
    names_of_events = [name for name in vars(Hook) if name.startswith("on_")]
    problems = []
    for hook in hooks:
        for name in dir(hook):
            if name.startswith("on_") and name not in names_of_events and callable(getattr(hook, name, None)):
                close = difflib.get_close_matches(name, names_of_events, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}? " if close else ""
                names = ", ".join(names_of_events)
                problems.append(f"{type(hook).__name__}.{name}: is never called; {hint}Hooks have {names}")
    if problems:
        raise UserError("\n".join(problems))


class Hooks(Hook):
    """All hooks of a rank as one hook, with their common log interval."""

    def __init__(self, log_interval: int, hooks: Sequence[Hook]) -> None:
        self.hooks, self.interval = list(hooks), Interval(log_interval)
        # if no hook reads values, avoid the device sync
        self._reads = any(
            type(hook).on_steps is not Hook.on_steps or type(hook).on_log is not Hook.on_log for hook in hooks
        )

    def on_train_start(self, run: RunInfo) -> None:
        self.interval.start(run.state)
        self._tell_all("on_train_start", run)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        """Call ``on_step`` of every hook after each iteration. At log points also call each hook's ``on_steps`` and
        ``on_log``, hook by hook; this waits for the device once. Collects and reads nothing unless a hook overrides
        one."""
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

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> None:
        self._show_steps()
        self._tell_all("on_samples", state, samples)

    def on_save(self, state: TrainState) -> None:
        self._show_steps()
        self._tell_all("on_save", state)

    def on_saved(self, state: TrainState) -> None:
        self._tell_all("on_saved", state)

    def on_save_wait(self, iteration: int) -> None:
        self._tell_all("on_save_wait", iteration)

    def on_save_timed(self, record: Record) -> None:
        self._tell_all("on_save_timed", record)

    def on_stop(self, state: TrainState, ending: Ending, reason: str) -> None:
        self._tell_all("on_stop", state, ending, reason)

    def on_train_end(self, state: TrainState) -> None:
        try:
            self._show_steps()  # may raise: it reads the device
        finally:
            self._tell_all("on_train_end", state)

    def _show_steps(self) -> None:
        if steps := self.interval.unseen():
            self._tell_all("on_steps", steps)

    def _tell_all(self, event: str, *arguments: object) -> None:
        for hook in list(self.hooks):
            self._tell(hook, event, *arguments)

    def _tell(self, hook: Hook, event: str, *arguments: object) -> None:
        """If the hook raises and has ``only_for`` set, log a warning and remove it for the rest of the run."""
        if hook not in self.hooks:
            return
        try:
            getattr(hook, event)(*arguments)
        except Exception as error:  # training must not depend on third-party writers
            if not hook.only_for:
                raise
            self.hooks.remove(hook)
            problem = f"{hook.only_for}: {type(error).__name__}: {error}"
            logger.warning("%s. Training continues without it; metrics.jsonl keeps the values", problem)
