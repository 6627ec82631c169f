"""Ranks of a served model end if rank 0 sends nothing."""

import pytest

from megatron.core.inference.engine import Engine
from megatron.core.inference.scheduler import Limits
from megatron.tools import serve
from tests.unit_tests.core.inference.test_engine import build


class Clock:
    """Time that passes only while something sleeps."""

    def __init__(self):
        self.now, self.slept = 100.0, lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept()


def test_a_rank_ends_if_rank_0_sends_nothing_within_the_limit(monkeypatch, capsys):
    clock, ends = Clock(), []
    monkeypatch.setattr(serve, "time", clock)
    monkeypatch.setattr(serve, "_exit_at_once", lambda: ends.append(clock.now))
    progress = serve.Progress(40)
    clock.slept = lambda: progress.mark() if clock.now < 180 else None
    thread = progress.watch()
    thread.join(10)
    assert ends == [pytest.approx(220, abs=4)]
    assert "rank 0 sends nothing since 40 s" in capsys.readouterr().err
    assert serve.Progress(0).watch() is None


def test_a_sign_of_life_is_progress():
    marks = []
    engine = Engine(build("grouped"), Limits(16, 50), num_pages=9, page_size=4, on_step=lambda: marks.append(1))
    engine.keep_alive()
    assert marks
