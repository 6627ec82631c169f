"""Base class of training loop hooks. Hooks only observe: training without hooks gives the same results."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron.core.config.errors import UserError
from megatron.training.hooks.interval import Interval
from megatron.training.observe.kinds.process import START, start_values
from megatron.training.observe.kinds.train import INTERVAL, TRAIN, train_values
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import Record, RecordKind, RunInfo, register
from megatron.training.observe.throughput import Throughput
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


class Hook:
    """Callbacks of the training loop, in calling order. By default they do nothing."""

    only_for: str = ""
    """Flag that requested this hook, if its failure must not end the run (such as a writer on a full disk): the hook is
    then removed with one warning. Empty: exceptions propagate."""
    failure: str = ""
    """Description of a requested result that failed. Training continues; the run then ends with exit code 1."""
    kinds: Sequence[RecordKind] | None = None
    """Kinds of the records that :meth:`on_record` receives; None: all. Records of iterations and log points (``train``,
    ``interval``) are made only on ranks with a hook that receives them, because they read values of the device."""

    def on_start(self, run: RunInfo) -> None:
        """Called once, after a checkpoint was loaded and before the first iteration. ``run.emit`` reports records."""

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        """Called after each iteration; ``state`` already includes it. ``metrics`` may hold tensors of the device."""

    def on_record(self, kind: RecordKind, record: Record) -> None:
        """Called with each record of :attr:`kinds`, in the order in which they are reported: iterations at log points
        and before evaluations, samples and saves."""

    def on_end(self) -> None:
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


def _takes(hook: Hook, kind: RecordKind) -> bool:
    return type(hook).on_record is not Hook.on_record and (hook.kinds is None or kind in hook.kinds)


class Hooks:
    """All hooks of a rank, with their common log interval. Each method calls this method of every hook."""

    def __init__(self, log_interval: int, hooks: Sequence[Hook]) -> None:
        self.hooks, self.interval = list(hooks), Interval(log_interval)
        self.run, self.throughput = RunInfo(state=TrainState(), train_iters=0), Throughput(1, "CPU")  # until on_start
        # if no hook takes records of iterations, avoid the device sync
        self._reads = any(_takes(hook, kind) for hook in hooks for kind in (TRAIN, INTERVAL))

    def on_start(self, run: RunInfo) -> None:
        self.run, self.throughput = replace(run, emit=self.emit), Throughput(run.world_size, run.device_name)
        self.interval.start(run.state)
        for hook in list(self.hooks):
            self._call(hook, "on_start", self.run)
        if run.trains:
            self.emit(START, start_values(run))

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        """Call ``on_step`` of every hook. At log points also report the iterations and the interval, which waits for
        the device once; does neither unless a hook takes these records."""
        is_log_point = self._reads and self.interval.add(state, metrics)
        for hook in list(self.hooks):
            self._call(hook, "on_step", state, metrics)
        if is_log_point:
            self._report_steps()
            if (values := self.interval.close(state, self.throughput)) is not None:
                self.emit(INTERVAL, values, state)

    def emit(self, kind: RecordKind, values: Mapping[str, object], state: TrainState | None = None) -> None:
        """Call ``on_record`` of every hook that takes ``kind`` with a record of ``values`` (JSON types by field) and
        the counters of ``state`` (default: the current ones). Records that a hook emits in ``on_record`` come first."""
        register(kind)
        if kind.follows_steps:
            self._report_steps()
        state = state or self.run.state
        self._deliver(kind, kind.record(state.iteration, state.consumed_train_samples, values))

    def on_end(self) -> None:
        try:
            self._report_steps()  # may raise: it reads the device
        finally:
            for hook in list(self.hooks):
                self._call(hook, "on_end")

    def _report_steps(self) -> None:
        for step in self.interval.unseen():
            self._deliver(TRAIN, TRAIN.record(step.iteration, step.consumed_samples, train_values(step.metrics)))

    def _deliver(self, kind: RecordKind, record: Record) -> None:
        for hook in list(self.hooks):
            if _takes(hook, kind):
                self._call(hook, "on_record", kind, record)

    def _call(self, hook: Hook, event: str, *arguments: object) -> None:
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
