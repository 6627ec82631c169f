"""Console output: log lines for people and scripts, on the standard output of the last rank.

The grammar is fixed (docs/reference/logging.md): fields, formats and order match Megatron-LM, so that parsers keep
working. Additional values (tokens per second, MFU, remaining time) get separate lines, never a new field."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TextIO

from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.train import INTERVAL
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.observe.throughput import cuda_memory_megabytes
from megatron.training.train_state import TrainState

REMAINING_SECONDS = 30.0
"""Minimum time between two lines about the remaining time."""


class StdoutHandler(logging.StreamHandler):
    """Handler that writes to the current ``sys.stdout``. A full disk or closed pipe gives one warning, no traceback."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(logging.Formatter("%(message)s"))
        self._failed = False

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore assignments; the stream is always the current ``sys.stdout``."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            logging.getLogger("megatron").warning("cannot write the log to standard output: %s", sys.exc_info()[1])
        self._failed = True


def stdout_logger() -> logging.Logger:
    """Return the logger that all printing hooks share (plain lines on ``sys.stdout`` only)."""
    lines = logging.getLogger("megatron.training.hooks.stdout")
    if not any(isinstance(handler, StdoutHandler) for handler in lines.handlers):
        lines.addHandler(StdoutHandler())
    lines.setLevel(logging.INFO)
    lines.propagate = False
    return lines


@dataclass
class Pace:
    """Pace since a first iteration, with evaluations and checkpoints."""

    first: tuple[int, float] | None = None

    def start(self, iteration: int, now: float) -> bool:
        """Start at this iteration and time unless the pace has started; return whether it starts now."""
        starts = self.first is None
        self.first = self.first or (iteration, now)
        return starts

    def remaining(self, iteration: int, train_iters: int, now: float) -> float | None:
        """Return the remaining seconds at ``now``; None if unknown."""
        if self.first is None or iteration <= self.first[0]:
            return None
        return (now - self.first[1]) / (iteration - self.first[0]) * (train_iters - iteration)


class ConsoleHook(Hook):
    """Prints the lines of records. Use on the last rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.pace, self.last_estimate = clock, Pace(), 0.0
        self.lines = stdout_logger()

    def on_start(self, run: RunInfo) -> None:
        self.run = run

    def on_record(self, kind: RecordKind, record: Record) -> None:
        """Print the lines of the record; after intervals also the remaining time, at most every REMAINING_SECONDS."""
        for line in kind.console(record, self.run):
            self.lines.info("%s", line)
        if kind is INTERVAL:
            self._estimate(record["iteration"], self.clock())

    def _estimate(self, iteration: int, now: float) -> None:
        # the first iteration compiles and allocates: the pace starts after it
        if self.pace.start(iteration, now) or iteration >= self.run.train_iters:
            self.last_estimate = self.last_estimate or now
        elif now - self.last_estimate >= REMAINING_SECONDS:
            self.last_estimate = now
            left = timedelta(seconds=round(self.pace.remaining(iteration, self.run.train_iters, now) or 0.0))
            end = datetime.now() + left
            self.lines.info("     time remaining: %s | complete about: %s", left, f"{end:%Y-%m-%d %H:%M}")


class MemoryHook(Hook):
    """Prints the CUDA allocator's state after the first iteration of the process and every ``interval`` iterations. Use
    on one data-parallel replica: each tensor- and pipeline-parallel rank reports itself."""

    def __init__(self, interval: int | None = None):
        self.interval = interval
        self.lines = stdout_logger()
        self.rank = 0
        self.reported = False

    def on_start(self, run: RunInfo) -> None:
        self.rank = run.rank

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        if self.reported and not every(self.interval, state.iteration):
            return
        self.reported = True
        self.lines.info(memory_line(self.rank, state.iteration, cuda_memory_megabytes()))


def memory_line(rank: int, iteration: int, megabytes: dict[str, float]) -> str:
    """Return the memory line; keys of ``megabytes``: "allocated", "max allocated", "reserved", "max reserved"."""
    sizes = " | ".join(f"{name}: {size:.1f}" for name, size in megabytes.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {sizes}"
