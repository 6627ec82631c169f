"""A real offline wandb run holds every value once, in rows whose steps never go back."""

import json
import sys
import time

import pytest

wandb = pytest.importorskip("wandb")
internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")

from megatron.core.timers import Timers  # noqa: E402
from megatron.training.config.logging import LoggingConfig  # noqa: E402
from megatron.training.hooks.base import Hooks  # noqa: E402
from megatron.training.hooks.sinks import WandbSink  # noqa: E402
from megatron.training.hooks.timing import TimingHook  # noqa: E402
from megatron.training.observe.kinds.sample import GENERATION, SAMPLE  # noqa: E402
from megatron.training.observe.kinds.save import SAVE, save_values  # noqa: E402

BLOCK, HEADER = 32768, 7  # LevelDB's log format, which a .wandb file is: blocks of (crc 4, length 2, type 1, bytes)


def rows_of(folder):
    """The history rows of the only offline run under ``folder``."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, position, full, rows = path.read_bytes(), HEADER, b"", []
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        position += HEADER
        full += data[position : position + length]
        position += length
        if kind in (1, 4):  # full, or the last part
            record = internal.Record.FromString(full)
            full = b""
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                )
    return rows


def written_rows(folder, count, seconds=30.0):
    """Return the rows when ``count`` rows exist: another process writes the file."""
    deadline = time.monotonic() + seconds
    while len(rows := rows_of(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return rows


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "120")  # its service process may start slowly on a loaded machine


def hook_in(folder, log_interval=5, point_interval=1):
    init = {"project": "p", "name": "n", "entity": None, "dir": str(folder), "config": {"lr": 0.1}}
    sink = WandbSink(LoggingConfig(tensorboard_log_interval=point_interval), init)
    return Hooks(log_interval, [sink, TimingHook(Timers())])


def test_every_iteration_and_evaluation_is_a_row(tmp_path, simulated_run, offline):
    simulated_run(eval_interval=3).train(hook_in(tmp_path), 1, 10)
    rows = written_rows(tmp_path, 10)
    assert [row["_step"] for row in rows] == list(range(1, 11))
    assert [row["lm loss"] for row in rows] == [pytest.approx(10.0 / i) for i in range(1, 11)]
    assert [row["_step"] for row in rows if "lm loss validation" in row] == [3, 6, 9]
    assert [row["_step"] for row in rows if "iteration-time" in row] == [1, 5, 10]
    assert rows[4]["samples vs steps"] == 40


class FakeRun:
    """wandb's rule: a row with a step before the last one is dropped."""

    def __init__(self, step=0):
        self.step, self.rows, self.finished = step, {}, False

    def log(self, values, step):
        assert step >= self.step, "wandb would drop this row"
        self.step = step
        row = self.rows.setdefault(step, {})
        assert not row.keys() & values.keys(), "a value logged twice"
        row.update(values)

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("log_interval", [1, 3, 4, 100])
@pytest.mark.parametrize("eval_interval", [1, 2, 5])
def test_no_row_is_dropped_or_repeated(tmp_path, simulated_run, monkeypatch, log_interval, eval_interval):
    fake = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **options: fake)
    simulated_run(eval_interval=eval_interval).train(hook_in(tmp_path, log_interval), 1, 10)
    assert fake.finished and sorted(fake.rows) == list(range(1, 11))
    evaluated = [step for step, row in fake.rows.items() if "lm loss validation" in row]
    assert evaluated == list(range(eval_interval, 11, eval_interval))
    assert all("grad-norm" in row for row in fake.rows.values())


def test_point_interval_thins_rows_but_no_evaluation(tmp_path, simulated_run, monkeypatch):
    fake = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **options: fake)
    simulated_run(eval_interval=5).train(hook_in(tmp_path, 10, point_interval=4), 1, 9)
    assert {step for step, row in fake.rows.items() if "lm loss" in row} == {4, 8}
    assert "lm loss validation" in fake.rows[5]


def test_a_background_save_is_in_the_latest_row(tmp_path, simulated_run, monkeypatch):
    fake = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **options: fake)
    hooks = hook_in(tmp_path, 1)
    simulated_run().train(hooks, 1, 5, crash=True)
    values = save_values(seconds=2.0, stall=0.5, num_bytes=10**9, background=True)
    hooks.emit(SAVE, values, simulated_run().state_at(3))
    expected = {"save-checkpoint-time": 2.0, "save-checkpoint-stall-time": 0.5, "save-checkpoint-gb-per-second": 0.5}
    assert expected.items() <= fake.rows[5].items() and not expected.keys() & fake.rows[3].keys()


def test_samples_are_html_in_the_row_of_their_iteration(tmp_path, simulated_run, monkeypatch):
    fake = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **options: fake)
    hooks = hook_in(tmp_path, 1)
    simulated_run().train(hooks, 1, 5, crash=True)
    hooks.emit(SAMPLE, {"number": 2, "prompt": "<b>", "text": " & text"})
    hooks.emit(GENERATION, {"seconds": 0.5})
    assert "<pre>&lt;b&gt; &amp; text</pre>" in fake.rows[5]["sample 2"].html
    assert fake.rows[5]["generation-time"] == 0.5


def test_a_continued_run_that_is_ahead_is_reported(tmp_path, simulated_run, monkeypatch, caplog):
    fake = FakeRun(step=50)
    monkeypatch.setattr(wandb, "init", lambda **options: fake)
    hook_in(tmp_path).on_start(simulated_run().info(40))
    assert "at step 50, training at iteration 40" in caplog.text


def test_without_the_package_the_error_names_flag_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="--wandb-project needs the wandb package .*pip install wandb"):
        hook_in(tmp_path)
