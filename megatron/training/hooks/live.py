"""Live view of a run on a terminal, with the optional package rich.

A block at the bottom of the terminal shows progress, remaining time, losses, rates and memory; evaluations, warnings
and other output scroll above it. It is drawn in the calls of the training loop, without a thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.console import evaluation_lines, sample_line
from megatron.training.hooks.interval import IntervalSummary
from megatron.training.hooks.sinks import Clock
from megatron.training.observe.metrics import EvalResult, Sample, StepMetrics
from megatron.training.observe.run_records import Ending
from megatron.training.observe.throughput import memory_bytes
from megatron.training.train_state import TrainState

REDRAW_SECONDS = 0.25


class LiveHook(Hook):
    """Shows the live view on standard output in place of iteration lines. Use on the rank that logs."""

    def __init__(self, clock: Clock, seconds: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.seconds = clock, seconds
        self.console = Console(file=sys.stdout, force_terminal=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=False, vertical_overflow="visible")
        self.train_iters, self.iteration, self.drawn = 0, 0, -REDRAW_SECONDS
        self.first: tuple[int, float] | None = None
        self.rows: dict[str, str] = {}
        self.handlers: list[logging.StreamHandler] = []

    def on_train_start(self, run: RunInfo) -> None:
        self.train_iters, self.iteration = run.train_iters, run.state.iteration
        before = sys.stdout
        self.live.start()
        # log handlers write above the view too: output that the view does not see would be drawn over
        for handler in logging.getLogger("megatron").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                self.handlers.append(handler)
                handler.setStream(sys.stdout)
        self.console.show_cursor(True)  # a process that is killed must not leave the terminal without a cursor

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        """Advance the bar; redraws at most every ``REDRAW_SECONDS`` and reads no device value."""
        self.iteration, now = state.iteration, self.seconds()
        if self.first is None:
            self.first = state.iteration, now  # without the first iteration, which compiles and allocates
        if now - self.drawn >= REDRAW_SECONDS:
            self._draw(now)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        last, clock = summary.last, self.clock
        rate = clock.throughput.rate(summary.flops, summary.num_tokens, summary.elapsed)
        rows = {name: f"{value:.4f}" for name, value in summary.losses.items()}
        rows["learning rate"] = f"{last.learning_rate:.3g}"
        if last.grad_norm is not None:
            rows["gradient norm"] = f"{last.grad_norm:.3f}"
        rows["ms per iteration"] = f"{summary.elapsed_per_iteration * 1000:,.1f}"
        rows["tokens per second"] = f"{rate.tokens_per_second:,.0f}"
        if rate.tflops is not None:
            rows["TFLOP/s per GPU"] = f"{rate.tflops:.1f}" + ("" if rate.mfu is None else f" ({rate.mfu:.1%} MFU)")
        memory = memory_bytes(clock.device)
        used = next(size for name, size in memory.items() if "max" in name)
        rows["memory, peak"] = f"{used / 2**30:.2f} GiB"
        if summary.num_skipped or summary.num_nan:
            rows["skipped, NaN"] = f"{summary.num_skipped}, {summary.num_nan}"
        validation = {name: value for name, value in self.rows.items() if name.startswith("validation")}
        self.rows = rows | validation
        self._draw(self.seconds())

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        """Print the evaluation line above the view, and keep the losses in it."""
        for result in results:
            for line in evaluation_lines(state.iteration, result)[1:2]:
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            for name, value in result.losses.items():
                data = f"{result.name}{'' if result.dataset is None else f' {result.dataset}'}"
                self.rows[f"{data}, {name}"] = f"{value:.4f} at {state.iteration:,}"
        self._draw(self.seconds())

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> None:
        """Print the lines of the samples above the view."""
        for sample in samples:
            line = sample_line(state.iteration, sample)
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._draw(self.seconds())

    def on_stop(self, state: TrainState, ending: Ending, reason: str) -> None:
        self._draw(self.seconds())

    def on_train_end(self, state: TrainState) -> None:
        self.live.stop()
        for handler in self.handlers:
            handler.setStream(sys.stdout)
        self.handlers.clear()

    def remaining(self, now: float) -> float | None:
        """Return the seconds that are left by the pace since the first iteration of this process; None if unknown."""
        if self.first is None or self.iteration <= self.first[0]:
            return None
        return (now - self.first[1]) / (self.iteration - self.first[0]) * (self.train_iters - self.iteration)

    def _draw(self, now: float) -> None:
        self.drawn = now
        left = self.remaining(now)
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        eta = "" if left is None else f"remaining {timedelta(seconds=round(left))}"
        bar = ProgressBar(total=max(self.train_iters, 1), completed=self.iteration)
        head.add_row(f"iteration {self.iteration:,}/{self.train_iters:,}", bar, eta)
        table = Table.grid(padding=(0, 2))
        half = (len(self.rows) + 1) // 2
        items = list(self.rows.items())
        for left_item, right_item in zip(items[:half], [*items[half:], ("", "")]):
            cells = [
                Text(text, style=style) for pair in (left_item, right_item) for text, style in zip(pair, ("dim", ""))
            ]
            table.add_row(*cells)
        self.live.update(Group(head, table), refresh=True)
