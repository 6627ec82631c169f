"""Console output: log lines for people and scripts, on the standard output of the last rank.

The grammar is fixed (docs/reference/logging.md): fields, formats and order match Megatron-LM, so that parsers keep
working. Additional values (tokens per second, MFU, remaining time) get separate lines, never a new field.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TextIO

from megatron.core.config.errors import printable
from megatron.core.timers import Timers
from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.interval import IntervalSummary
from megatron.training.observe.metrics import EvalResult, Sample, StepMetrics
from megatron.training.observe.throughput import Throughput, cuda_memory_megabytes
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
    """Return the logger that all printing hooks share, with one handler that writes plain message lines to
    ``sys.stdout``. Sets its level to INFO and stops propagation, so that log files and the root logger do not receive
    the lines."""
    lines = logging.getLogger("megatron.training.hooks.stdout")
    if not any(isinstance(handler, StdoutHandler) for handler in lines.handlers):
        lines.addHandler(StdoutHandler())
    lines.setLevel(logging.INFO)
    lines.propagate = False
    return lines


def training_line(summary: IntervalSummary, train_iters: int, tflops: float | None, now: datetime) -> str:
    """Return the iteration line of a log interval in Megatron-LM's format: counters, milliseconds per iteration, mean
    losses, and the last iteration's learning rate, batch size, loss scale and norms. Omits absent norms and, with None,
    ``tflops`` (per device)."""
    last = summary.last
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {summary.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {summary.consumed_samples:12d}",
        f"skipped samples: {summary.skipped_samples:12d}" if summary.skipped_samples > 0 else "",
        f"elapsed time per iteration (ms): {summary.elapsed_per_iteration * 1000.0:.1f}",
        "" if tflops is None else f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}",
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        *(f"{name}: {value:.6E}" for name, value in summary.losses.items()),
        f"loss scale: {last.loss_scale:.1f}",
        "" if last.grad_norm is None else f"grad norm: {last.grad_norm:.3f}",
        "" if last.num_zeros is None else f"num zeros: {int(last.num_zeros)}",
        "" if last.params_norm is None else f"params norm: {last.params_norm:.3f}",
        f"number of skipped iterations: {summary.num_skipped:3d}",
        f"number of nan iterations: {summary.num_nan:3d}",
    ]
    return " | ".join(filter(None, fields)) + " |"


def evaluation_lines(iteration: int, result: EvalResult) -> list[str]:
    """Return one line with the scores of a task, or three lines: value and perplexity of each loss between rules of
    dashes. The line names the split only for final or test results, and the data set if there are several."""
    if result.name == "task":
        scores = " | ".join(f"{name}: {value:.4f}" for name, value in result.losses.items())
        return [f" task {result.dataset} at iteration {iteration} | {scores}"]
    suffix = f"-{result.dataset}" if result.dataset else ""
    place = f"iteration {iteration}" + (f" on {result.name} set" if result.final or result.name == "test" else "")
    line = f" validation{suffix} loss at {place} | "
    for name, value in result.losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def sample_line(iteration: int, sample: Sample) -> str:
    """Return the line of a sample, with prompt and text as quoted strings: without line ends and control characters."""
    prompt, text = (printable(json.dumps(part, ensure_ascii=False)) for part in (sample.prompt, sample.text))
    return f" sample {sample.number} at iteration {iteration} | {prompt} | {text}"


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss clamped at 20 as in Megatron-LM, which bounds the width of the number."""
    return math.exp(min(20.0, loss))


class RemainingTime:
    """Estimate of the remaining training time from the pace since the first log point. Evaluations and checkpoints are
    included; the first iteration, which compiles and allocates, is not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.first: tuple[int, float] | None = None
        self.said = 0.0

    def line(self, iteration: int, train_iters: int, now: datetime) -> str | None:
        """Return the line with the remaining time and the expected end. Returns None at the first call, which starts
        the measurement, within ``REMAINING_SECONDS`` after the last line, and at the end of training."""
        seconds = self.clock()
        if self.first is None:
            self.first, self.said = (iteration, seconds), seconds
            return None
        if seconds - self.said < REMAINING_SECONDS or iteration >= train_iters:
            return None
        self.said = seconds
        first_iteration, first_seconds = self.first
        pace = (seconds - first_seconds) / (iteration - first_iteration)
        left = timedelta(seconds=round(pace * (train_iters - iteration)))
        return f"     time remaining: {left} | complete about: {now + left:%Y-%m-%d %H:%M}"


class ConsoleHook(Hook):
    """Prints the iteration line at log points and the evaluation lines. Use on the last rank."""

    def __init__(self, throughput: Throughput | None = None, clock: Callable[[], float] = time.monotonic):
        self.throughput = throughput
        self.remaining = RemainingTime(clock)
        self.lines = stdout_logger()
        self.train_iters = 0

    def on_train_start(self, run: RunInfo) -> None:
        self.train_iters = run.train_iters

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        """Print the iteration line; with a ``throughput``, its TFLOP/s field and a second line with the rates. Print
        the remaining time on a separate line when it is due."""
        now = datetime.now()
        if self.throughput is None:
            self.lines.info(training_line(summary, self.train_iters, None, now))
        else:
            rate = self.throughput.rate(summary.flops, summary.num_tokens, summary.elapsed)
            self.lines.info(training_line(summary, self.train_iters, rate.tflops, now))
            self.lines.info(rate.line())
        if (line := self.remaining.line(summary.iteration, self.train_iters, now)) is not None:
            self.lines.info(line)

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        for result in results:
            for line in evaluation_lines(state.iteration, result):
                self.lines.info(line)

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self.lines.info("%s", sample_line(state.iteration, sample))


class TimersHook(Hook):
    """At each log point, gathers the time per iteration of every timer and prints it on the last rank. Use on every
    rank, before the sinks: the gathering is collective."""

    def __init__(self, timers: Timers):
        self.timers = timers
        self.prints = False

    def on_train_start(self, run: RunInfo) -> None:
        self.prints = run.is_log_rank

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        text = self.timers.text(normalizer=len(summary.steps))
        if text is not None and self.prints:
            stdout_logger().info("%s", text)


class MemoryHook(Hook):
    """Prints the CUDA allocator's state after the first iteration of the process and every ``interval`` iterations. Use
    on one data-parallel replica: each tensor- and pipeline-parallel rank reports itself."""

    def __init__(self, interval: int | None = None):
        self.interval = interval
        self.lines = stdout_logger()
        self.rank = 0
        self.reported = False

    def on_train_start(self, run: RunInfo) -> None:
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
