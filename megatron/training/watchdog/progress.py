"""Progress of a rank's main thread: its phase, and the maximum silence allowed in it.

Progress is an event of a forward step (``ForwardEvent``) or of the training loop. The limit is
--watchdog-timeout-seconds, or three times the longest silence of the run so far if that is longer. Before the first
iteration only dead processes count as failures. The first iteration, the first micro-batch of an evaluation,
generation, checkpoints and the end of the run have an unknown duration; their limit is 0.9 x
--distributed-timeout-minutes. The watchdog, which knows the culprit, thus acts before the collective time-out of the
waiting ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatron.core.pipeline_parallel.runtime import ForwardEvent
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.evaluation import TASK, TEST, VALID
from megatron.training.observe.kinds.sample import SAMPLE
from megatron.training.observe.kinds.save import SAVE, SAVE_WAIT, SAVING
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.train_state import TrainState

STARTING = "starting"
DATA = "waiting for data"
EVALUATION_DATA = "waiting for evaluation data"
COMPUTING = "computing"
EVALUATING = "evaluating"
GENERATING = "generating text"
SHARE_OF_COLLECTIVE_TIMEOUT = 0.9


@dataclass(frozen=True)
class Heartbeat:
    """Snapshot of a rank's progress, published to the store."""

    count: int
    """Number of heartbeats so far; a value that stays constant means that the process is stopped or lost."""
    iteration: int
    """Number of completed iterations."""
    ticks: int
    """Number of progress marks so far."""
    phase: str
    silence: float
    """Seconds since the last progress mark."""
    allowed: float
    """Maximum silence in seconds."""

    @property
    def where(self) -> str:
        """Text such as ``iteration 7, waiting for data``."""
        if self.phase == STARTING:
            return "before the first iteration"
        return f"iteration {self.iteration + (self.phase in (DATA, COMPUTING, 'first iteration'))}, {self.phase}"

    @property
    def waits_for_data(self) -> bool:
        return self.phase in (DATA, EVALUATION_DATA)


class RankProgress:
    """Progress marks of this process. Written by the main thread, read by the watchdog threads."""

    def __init__(self, timeout: float, collective_timeout: float) -> None:
        """``timeout``, ``collective_timeout``: limits in seconds. The silence before the first mark has no limit."""
        self.timeout = timeout
        self.long_timeout = max(SHARE_OF_COLLECTIVE_TIMEOUT * collective_timeout, timeout)
        self.phase, self.iteration, self.ticks = STARTING, 0, 0
        self.allowed = float("inf")
        self.ordinary = False
        self.longest_silence = 0.0
        self.last = time.monotonic()

    def mark(self, phase: str, *, long: bool = False) -> None:
        """Record that the main thread reached ``phase``, and set the maximum silence from now on: the timeout
        (``long``: the long timeout), or three times the longest silence so far if that is longer. The silence before
        this mark counts for it, unless it followed a ``long`` mark."""
        now = time.monotonic()
        if self.ordinary:
            self.longest_silence = max(self.longest_silence, now - self.last)
        self.last, self.phase = now, phase
        self.ticks += 1
        self.ordinary = not long
        self.allowed = max(self.long_timeout if long else self.timeout, 3 * self.longest_silence)

    def forgive(self, seconds: float) -> None:
        """Ignore ``seconds`` of silence during which the whole process was suspended."""
        self.last += seconds

    def heartbeat(self, count: int = 0) -> Heartbeat:
        """Return the current progress as a heartbeat with number ``count``."""
        return Heartbeat(count, self.iteration, self.ticks, self.phase, time.monotonic() - self.last, self.allowed)


class WatchdogHook(Hook):
    """Hook that marks the events of the training loop as progress."""

    kinds = (VALID, TEST, TASK, SAMPLE, SAVING, SAVE_WAIT, SAVE)

    def __init__(self, progress: RankProgress) -> None:
        self.progress = progress

    def on_start(self, run: RunInfo) -> None:
        self.progress.iteration = run.state.iteration
        self.progress.mark("first iteration", long=True)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        self.progress.iteration = state.iteration
        self.progress.mark("between iterations")

    def on_record(self, kind: RecordKind, record: Record) -> None:
        if kind is SAVING:
            self.progress.mark("saving a checkpoint", long=True)
        elif kind is SAVE_WAIT:
            self.progress.mark(f"waiting for the background save of iteration {record['saved_iteration']}", long=True)
        else:
            self.progress.mark(f"after the record {kind.name}")

    def on_end(self) -> None:
        self.progress.mark("closing files and logs", long=True)  # an upload may be slow


class ForwardProgress:
    """Marks the events of forward steps as progress (``Work.on_forward``). Forward steps that may compile (first
    iteration, first evaluation pass) get the long limit."""

    def __init__(self, progress: RankProgress) -> None:
        self.progress = progress
        self._first_iteration: int | None = None
        """Number of completed iterations during the first training forward step; None before it."""
        self._has_evaluated = False

    def __call__(self, event: ForwardEvent, training: bool) -> None:
        """Mark an event of a training or evaluation forward step as progress: ``reads`` starts a phase of waiting for
        data, other events one of computing. The limit is long during the first training iteration, until the first
        evaluation forward step is done, and in generation: ranks wait for the rank that prepares the requests."""
        progress = self.progress
        if event == "generates":
            progress.mark(GENERATING, long=True)
            return
        phases = (DATA, COMPUTING) if training else (EVALUATION_DATA, EVALUATING)
        if event == "done" and training and self._first_iteration is None:
            self._first_iteration = progress.iteration
        if event == "done" and not training:
            self._has_evaluated = True
        is_first = self._first_iteration in (None, progress.iteration) if training else not self._has_evaluated
        progress.mark(phases[event != "reads"], long=is_first)
