"""Timers: names and text that users know, and no cost at level 0."""

import logging
import re

import pytest
import torch

from megatron.core import timers as module
from megatron.core.timers import NullTimer, Timers


@pytest.fixture
def clock(monkeypatch):
    """perf_counter under control."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_elapsed_sums_runs_and_resets(clock):
    timers = Timers(log_level=1)
    for _ in range(3):
        timers("forward-backward", log_level=1).start(barrier=False)
        clock(0.5)
        timers("forward-backward").stop()
        clock(9.0)
    timer = timers("forward-backward")
    assert timer.elapsed(reset=False) == 1.5 and timer.elapsed() == 1.5
    assert timer.elapsed() == 0.0 and timer.active_time() == 1.5


def test_elapsed_of_a_running_timer_lets_it_run(clock):
    timer = Timers(0)("interval-time", log_level=0)
    timer.start()
    clock(1.0)
    assert timer.elapsed() == 1.0 and timer.active
    clock(0.25)
    assert timer.elapsed() == 0.25


def test_a_with_block_is_timed_and_an_error_in_it_stops_the_timer(clock):
    timers = Timers(1)
    with timers("optimizer", log_level=1):
        clock(2.0)
    assert timers("optimizer").elapsed() == 2.0
    with pytest.raises(KeyError), timers("optimizer", log_level=1):
        raise KeyError
    assert not timers("optimizer").active


def test_level_zero_costs_nothing():
    timers = Timers(log_level=0)
    first = timers("forward-backward", log_level=1)
    assert isinstance(first, NullTimer) and timers("batch-generator", log_level=2) is not first
    with first:
        first.start()  # never "already started"
        first.stop()
    assert timers.text() is None and first.elapsed() == 0.0


def test_wrong_use_is_an_error():
    timers = Timers(2)
    timers("a", log_level=1).start()
    with pytest.raises(RuntimeError, match="'a' has already been started"):
        timers("a").start()
    with pytest.raises(RuntimeError, match="'b' is not started"):
        timers("b").stop()
    with pytest.raises(ValueError, match="log level 1; it cannot be used with 2"):
        timers("a", log_level=2)
    with pytest.raises(ValueError, match="not within 0 to 2"):
        timers("c", log_level=3)
    with pytest.raises(ValueError, match="--timing-log-option 'mean'"):
        Timers(1, "mean")


def test_minmax_text_has_dots_to_column_48(clock):
    timers = Timers(1)
    with timers("forward-backward", log_level=1):
        clock(0.5)
    text = timers.text(normalizer=10)
    head, line = text.split("\n")
    assert head == "(min, max) time across ranks (ms):"
    assert line == "    " + "forward-backward ".ljust(48, ".") + ": (50.00, 50.00)"
    assert re.search(r"forward-backward \.+: \((\d+\.\d+), (\d+\.\d+)\)", text)
    assert timers.latest == {"forward-backward": 50.0}


def test_log_goes_to_the_logger(clock, caplog):
    timers = Timers(1, "max")
    with timers("optimizer", log_level=1):
        clock(0.001)
    with caplog.at_level(logging.INFO):
        timers.log(["optimizer", "unknown"])
    assert "max time across ranks (ms):" in caplog.text and "1.00" in caplog.text and "unknown" not in caplog.text


def test_write_gives_seconds(clock):
    timers, points = Timers(1), []
    with timers("optimizer", log_level=1):
        clock(2.0)
    writer = type("Writer", (), {"add_scalar": lambda self, *args: points.append(args)})()
    timers.write(["optimizer"], writer, 7, normalizer=4)
    assert points == [("optimizer-time", 0.5, 7)]


@pytest.mark.parametrize("level", [0, 1])
def test_every_timer_is_a_range_in_a_trace(level):
    timer = Timers(level)("optimizer", log_level=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        with timer:
            torch.ones(1)
        with pytest.raises(KeyError), timer:
            raise KeyError
    names = [event.name for event in trace.events()]
    assert names.count("optimizer") == 2 and "aten::ones" in names


def text_of_two_ranks(rank, world_size, option):
    timers = Timers(1, option)
    timer = timers("forward-backward", log_level=1)
    timer._elapsed = 0.1 * (rank + 1)
    if rank == 1:  # a timer of the last pipeline stage only
        timers("optimizer", log_level=1)._elapsed = 0.03
    return timers.text()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("minmax", ["forward-backward .*: \\(100.00, 200.00\\)", "optimizer .*: \\(30.00, 30.00\\)"]),
        ("max", ["forward-backward .*: 200.00$", "optimizer .*: 30.00$"]),
        ("all", ["rank  0: 100.00", "rank  1: 200.00", "optimizer:\n     rank  1: 30.00"]),
    ],
)
def test_text_covers_all_ranks(gloo_pool, option, expected):
    texts = gloo_pool.run(text_of_two_ranks, 2, option)
    assert texts[0] == texts[1]
    for pattern in expected:
        assert re.search(pattern, texts[0], re.MULTILINE), texts[0]
