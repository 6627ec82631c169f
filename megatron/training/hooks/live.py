"""Live view of a run on a terminal, with the optional package rich.

A block at the bottom of the terminal shows progress, remaining time, losses, rates and memory; evaluations, warnings
and other output scroll above it. It is drawn in the calls of the training loop, without a thread."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron.training.hooks.base import Hook
from megatron.training.hooks.console import Pace
from megatron.training.observe.kinds.evaluation import SPLITS, TASK, TEST, VALID
from megatron.training.observe.kinds.timing import TIMING
from megatron.training.observe.kinds.train import INTERVAL, TRAIN
from megatron.training.observe.metrics import StepMetrics, record_losses
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.train_state import TrainState

REDRAW_SECONDS = 0.25


class LiveHook(Hook):
    """Shows the live view on standard output in place of iteration lines. Use on the rank that logs."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.console = Console(file=sys.stdout, force_terminal=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=False, vertical_overflow="visible")
        self.train_iters, self.iteration, self.drawn = 0, 0, -REDRAW_SECONDS
        self.pace = Pace()
        self.rows: dict[str, str] = {}
        self.handlers: list[logging.StreamHandler] = []

    def on_start(self, run: RunInfo) -> None:
        self.run = run
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
        self.pace.start(state.iteration, now)  # without the first iteration, which compiles and allocates
        if now - self.drawn >= REDRAW_SECONDS:
            self._draw(now)

    def on_record(self, kind: RecordKind, record: Record) -> None:
        """Print the lines of the record above the view, without rules and the lines of intervals; keep the values of
        intervals and evaluations in it."""
        if kind is INTERVAL:
            self._show_interval(record)
        elif kind is TIMING:
            used = next(size for name, size in record["memory"].items() if "max" in name)
            self.rows["memory, peak"] = f"{used / 2**30:.2f} GiB"
        elif kind in (VALID, TEST, TASK):
            data = " ".join(filter(None, (SPLITS.get(kind.name, kind.name), record.get("dataset"))))
            for name, value in record_losses(record).items():
                self.rows[f"{data}, {name}"] = f"{value:.4f} at {record['iteration']:,}"
        lines = [] if kind is INTERVAL else [line for line in kind.console(record, self.run) if line.strip("-")]
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if kind is not TRAIN:
            self._draw(self.seconds())

    def _show_interval(self, record: Record) -> None:
        rows = {name: f"{value:.4f}" for name, value in record["losses"].items()}
        rows["learning rate"] = f"{record['learning_rate']:.3g}"
        if record["grad_norm"] is not None:
            rows["gradient norm"] = f"{record['grad_norm']:.3f}"
        rows["ms per iteration"] = f"{record['seconds'] / record['iterations'] * 1000:,.1f}"
        rows["tokens per second"] = f"{record['tokens_per_second']:,.0f}"
        if (tflops := record["tflops_per_device"]) is not None:
            rows["TFLOP/s per GPU"] = f"{tflops:.1f}" + ("" if record["mfu"] is None else f" ({record['mfu']:.1%} MFU)")
        if record["num_skipped"] or record["num_nan"]:
            rows["skipped, NaN"] = f"{record['num_skipped']}, {record['num_nan']}"
        self.rows = rows | {name: value for name, value in self.rows.items() if name.startswith("validation")}

    def on_end(self) -> None:
        self.live.stop()
        for handler in self.handlers:
            handler.setStream(sys.stdout)
        self.handlers.clear()

    def _draw(self, now: float) -> None:
        self.drawn = now
        left = self.pace.remaining(self.iteration, self.train_iters, now)
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
