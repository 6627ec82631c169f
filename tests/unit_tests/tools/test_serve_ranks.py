"""Ranks of a served model end if rank 0 sends nothing."""

import threading
import time

import pytest

from megatron.core.inference.engine import Engine
from megatron.core.inference.scheduler import Limits
from megatron.tools import serve
from tests.unit_tests.core.inference.test_engine import build


@pytest.mark.parametrize("limit", [0.4, 0])
def test_a_rank_ends_if_rank_0_sends_nothing_within_the_limit(monkeypatch, capsys, limit):
    ended = threading.Event()
    monkeypatch.setattr(serve, "_exit_at_once", ended.set)
    progress = serve.Progress(limit)
    progress.watch()
    for _ in range(8):
        time.sleep(0.1)
        progress.mark()
    assert not ended.is_set()
    assert ended.wait(2) == bool(limit)
    assert ("rank 0 sends nothing since 0.4 s" in capsys.readouterr().err) == bool(limit)


def test_a_sign_of_life_is_progress():
    marks = []
    engine = Engine(build("grouped"), Limits(16, 50), num_pages=9, page_size=4, on_step=lambda: marks.append(1))
    engine.keep_alive()
    assert marks
