"""The live view on a pseudo-terminal: the final screen, other output above it, the cursor, no device reads."""

import io
import logging
import os
import pty
import re
import sys
import threading

import pytest

pytest.importorskip("rich")

from megatron.core.timers import Timers
from megatron.training.hooks.base import Hooks
from megatron.training.hooks.live import LiveHook
from megatron.training.hooks.timing import TimingHook
from megatron.training.observe.kinds.sample import SAMPLE
from tests.unit_tests.training.hooks.conftest import step_metrics


@pytest.fixture
def terminal(monkeypatch):
    """Function that makes a pseudo-terminal of 100 columns the standard output, and returns a function for everything
    that was written. To be called in the test: pytest sets standard output again after fixtures."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    leader, follower = pty.openpty()
    stream, chunks = os.fdopen(follower, "w", buffering=1), []

    def read():
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:
                return
            if not data:
                return
            chunks.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def written():
        stream.close()
        reader.join(10)
        os.close(leader)
        return b"".join(chunks).decode()

    def use():
        monkeypatch.setattr(sys, "stdout", stream)
        return written

    return use


def screen(text):
    """The lines that a terminal shows after ``text``, for the codes that the view uses."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token[0] not in "\x1b\r":
            lines[row] += token
    return [line.rstrip() for line in lines]


def test_the_screen_ends_with_progress_losses_rates_and_memory(terminal, simulated_run):
    written, now = terminal(), iter(range(10_000))
    hooks = [LiveHook(lambda: float(next(now))), TimingHook(Timers())]
    simulated_run(train_iters=40, eval_interval=10).train(Hooks(5, hooks), 1, 20)
    lines = screen(written())
    view = "\n".join(lines[-8:])
    assert "iteration 20/40" in view and "remaining 0:0" in view
    for text in (
        "lm loss",
        "0.5590",
        "learning rate",
        "gradient norm",
        "tokens per second",
        "2,048",
        "memory, peak",
        "validation, lm loss",
        "4.4721 at 20",
    ):
        assert text in view, view
    assert sum("iteration 20/40" in line for line in lines) == 1  # drawn over, not repeated
    assert [line for line in lines if line.startswith(" validation loss at iteration")] and "-----" not in "".join(
        lines
    )


@pytest.mark.parametrize("first", [1, 61])
def test_the_values_of_the_view_follow_from_the_last_interval(terminal, simulated_run, monkeypatch, first):
    """Iterations take 7 s on the clock, and 0.25 s without evaluations; a resumed process knows its own pace only."""
    monkeypatch.setattr("megatron.training.hooks.timing.memory_bytes", lambda device: {"now": 1, "mem-max": 13 * 2**28})
    written, now = terminal(), [0.0]
    hooks = Hooks(10, [LiveHook(lambda: now[-1]), TimingHook(Timers())])
    run = simulated_run(train_iters=200, eval_interval=40, rank=3, world_size=4, device_name="NVIDIA H200")

    def metrics(iteration):
        now.append(7.0 * iteration)
        return step_metrics(iteration, skipped=iteration == 79, num_tokens=iteration * 100)

    run.train(hooks, first, 80, metrics=metrics)
    view = " ".join("\n".join(screen(written())[-8:]).split())
    last = range(71, 81)
    used = [iteration for iteration in last if iteration != 79]
    expected = {
        "iteration": "80/200",
        "remaining": "0:14:00",  # 7 x 120 s
        "lm loss": f"{sum(10 / iteration for iteration in used) / 9:.4f}",
        "learning rate": "0.08",
        "gradient norm": "81.000",
        "ms per iteration": "250.0",
        "tokens per second": f"{100 * sum(last) / 2.5:,.0f}",
        "TFLOP/s per GPU": "1.0 (0.1% MFU)",  # 10 iterations x 1e12 FLOPs / 2.5 s / 4 GPUs
        "memory, peak": "3.25 GiB",
        "skipped, NaN": "1, 0",
        "validation, lm loss": f"{20 / 80**0.5:.4f} at 80",
    }
    for name, value in expected.items():
        assert f"{name} {value}" in re.sub("[━╸╺ ]+", " ", view), (name, view)


def test_log_lines_and_prints_stay_above_the_view(terminal, simulated_run, monkeypatch):
    written, logger = terminal(), logging.getLogger("megatron")
    handler = logging.StreamHandler(sys.stdout)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)

    class Talking(LiveHook):
        def on_step(self, state, metrics):
            super().on_step(state, metrics)
            if state.iteration == 3:
                logger.warning("a warning of the library")
                self.on_record(SAMPLE, SAMPLE.record(3, 24, {"number": 1, "prompt": "Once", "text": " upon"}))
                print("a line of a program")

    simulated_run(train_iters=8).train(Hooks(1, [Talking()]), 1, 8)
    assert handler.stream is sys.stdout
    lines = screen(written())
    view = next(index for index, line in enumerate(lines) if line.startswith("iteration 8/8"))
    for text in ("a warning of the library", "a line of a program", ' sample 1 at iteration 3 | "Once" | " upon"'):
        assert sum(text in line for line in lines) == 1
        assert next(index for index, line in enumerate(lines) if text in line) < view


def test_the_cursor_is_visible_while_the_view_is_shown(terminal, simulated_run):
    written, hook = terminal(), LiveHook()
    hook.on_start(simulated_run().info())  # a process that is killed now leaves a usable terminal
    hook.on_end()
    text = written()
    assert text.index("\x1b[?25h") > text.index("\x1b[?25l")
    assert text.count("\x1b[?25h") == 2  # once at the start, once at the end


def test_a_step_reads_no_value_of_the_device(simulated_run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    hook = LiveHook()
    hook.on_start(simulated_run().info())

    class Unread:
        def __getattribute__(self, name):
            raise AssertionError(f"read {name}")

    hook.on_step(simulated_run().state_at(1), Unread())
    hook.on_end()
