"""The metrics file keeps every value exactly once, through resumes, torn writes and full disks."""

import json
import logging
import math
import os

import pytest
import torch

from megatron.training.observe import metrics as module
from megatron.training.observe.kinds.evaluation import EvalResult, evaluation_records
from megatron.training.observe.kinds.sample import SAMPLE
from megatron.training.observe.kinds.train import TRAIN, train_values
from megatron.training.observe.metrics import (
    MetricsFile,
    NonFiniteError,
    StepMetrics,
    check_finite,
    decode,
    encode,
    materialize,
    read_metrics,
    record_losses,
)


def record(iteration, **extra):
    return {
        "kind": "train",
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "lm loss": 10 / iteration,
        **extra,
    }


def write(path, iterations):
    file = MetricsFile(path)
    for iteration in iterations:
        file.append(record(iteration))
    file.flush()
    return file


def iterations_of(path):
    return [read_metric["iteration"] for read_metric in read_metrics(path)]


# reading values


def test_materialize_reads_all_tensors_and_keeps_their_values():
    steps = [
        StepMetrics(
            losses={"lm loss": torch.tensor(2.0 + i, dtype=torch.float64), "aux": torch.tensor(0.1)},
            num_tokens=torch.tensor(100),
            learning_rate=1e-3,
            global_batch_size=8,
            grad_norm=torch.tensor(1.5 + i),
        )
        for i in range(3)
    ]
    materialize(steps)
    assert [step.losses["lm loss"] for step in steps] == [2.0, 3.0, 4.0]
    assert steps[0].losses["aux"] == float(torch.tensor(0.1))  # fp32 widened, not rounded
    assert steps[1].num_tokens == 100 and isinstance(steps[1].num_tokens, int)
    assert steps[2].grad_norm == 3.5
    materialize(steps)  # a second sink changes nothing
    assert steps[0].losses["lm loss"] == 2.0


def test_materialize_copies_once_per_dtype_for_50_steps(monkeypatch):
    stacks = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors: stacks.append(len(tensors)) or stack(tensors))
    materialize(
        StepMetrics(
            losses={"a": torch.tensor(1.0), "b": torch.tensor(2.0)},
            num_tokens=1,
            learning_rate=0.0,
            global_batch_size=1,
        )
        for _ in range(50)
    )
    assert stacks == [100]


def test_materialize_marks_iterations_whose_loss_is_nan():
    step = StepMetrics(losses={"lm loss": torch.tensor(math.nan)}, num_tokens=1, learning_rate=0.0, global_batch_size=1)
    materialize([step])
    assert step.nan is True


# records


def test_floats_survive_the_file_bit_for_bit():
    values = [0.1 + 0.2, 1e-300, 5e-324, 1.7976931348623157e308, -0.0, float(torch.tensor(0.1))]
    for value in values:
        back = decode(encode({"iteration": 1, "x": value}))["x"]
        assert back.hex() == value.hex()


def test_non_finite_values_stay_valid_json():
    line = encode({"iteration": 1, "a": math.nan, "b": math.inf, "c": -math.inf})
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = decode(line)
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf


def test_a_data_set_named_nan_stays_a_name():
    assert decode(encode({"kind": "valid", "iteration": 1, "dataset": "nan"}))["dataset"] == "nan"


def test_records_hold_no_wall_clock_value():
    step = StepMetrics(losses={"lm loss": 2.0}, num_tokens=64, learning_rate=1e-3, global_batch_size=8, elapsed=1.25)
    record = TRAIN.record(1, 8, train_values(step))
    assert 1.25 not in record.values() and "time" not in record
    assert list(record)[:4] == ["kind", "iteration", "consumed_samples", "lm loss"]


def test_records_round_trip_through_their_file():
    step = StepMetrics(losses={"lm loss": 2.0}, num_tokens=64, learning_rate=1e-3, global_batch_size=8, grad_norm=1.0)
    record = TRAIN.record(3, 24, train_values(step))
    values = {name: record[name] for name in vars(step).keys() & record}
    assert StepMetrics(losses=record_losses(record), **values) == step
    for result in (
        EvalResult("validation", None, {"lm loss": 2.0}),
        EvalResult("test", "code", {"lm loss": 2.5}, final=True),
    ):
        ((kind, written),) = evaluation_records([result])
        record = kind.record(3, 24, written)
        name = "validation" if record["kind"] == "valid" else "test"
        assert EvalResult(name, record.get("dataset"), record_losses(record), record.get("final", False)) == result


def test_the_duration_of_an_evaluation_is_that_of_all_its_sets():
    results = [EvalResult("validation", name, {"lm loss": 2.0}, seconds=x) for name, x in (("a", 2.0), ("b", 3.5))]
    assert [values for kind, values in evaluation_records(results) if kind.name == "evaluation"] == [{"seconds": 5.5}]


# the file


def test_flush_writes_complete_lines_and_fsyncs_durable_records_once(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.append(record(1))
    assert not file.path.exists()
    file.flush()
    assert iterations_of(file.path) == [1] and len(synced) == 0
    file.flush(durable=True)
    file.flush(durable=True)
    assert iterations_of(file.path) == [1] and len(synced) == 1


@pytest.mark.parametrize("resumed_at", [0, 1, 4, 6, 10, 11])
def test_resume_then_training_gives_the_bytes_of_an_uninterrupted_run(tmp_path, resumed_at):
    write(tmp_path / "whole.jsonl", range(1, 13))
    crashed = tmp_path / "crashed.jsonl"
    write(crashed, range(1, 11))  # the crash came after iteration 10, the checkpoint is older
    file = MetricsFile(crashed)
    retained = min(resumed_at, 10)
    assert file.resume(resumed_at) == 10 - retained
    for iteration in range(retained + 1, 13):
        file.append(record(iteration))
    file.flush()
    assert crashed.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_records_that_resume_removes_move_to_a_cut_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):  # two rollbacks to the same checkpoint
        write(path, range(len(iterations_of(path)) + 1 if path.exists() else 1, 6))
        MetricsFile(path).resume(3)
    assert iterations_of(path) == [1, 2, 3]
    assert iterations_of(tmp_path / "metrics.jsonl.cut-3") == [4, 5, 4, 5]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "metrics.jsonl.cut-3"]


@pytest.mark.parametrize(
    "torn", [b"{", b'{"kind": "train", "iteration": 4, "lm', b'{"iteration": 4}', b"\xff\xfe", b"\x00" * 50]
)
def test_a_torn_last_line_is_repaired(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    full = path.read_bytes()
    path.write_bytes(full + torn)
    assert iterations_of(path) == [1, 2, 3]
    MetricsFile(path).resume(3)
    assert path.read_bytes() == full


def test_a_resume_without_later_records_does_not_change_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    before = path.stat()
    assert MetricsFile(path).resume(3) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_final_evaluations_are_cut_when_training_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = write(path, range(1, 4))
    file.append({"kind": "valid", "iteration": 3, "consumed_samples": 24, "lm loss": 1.0})
    file.append({"kind": "valid", "iteration": 3, "consumed_samples": 24, "final": True, "lm loss": 1.0})
    file.flush()
    assert MetricsFile(path).resume(3) == 1
    assert [read_metric["kind"] for read_metric in read_metrics(path)] == ["train"] * 3 + ["valid"]


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_kill_while_cutting_leaves_a_complete_file(tmp_path, monkeypatch, at):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    replace = os.replace

    def killed(source, target):
        if at == "after":
            replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path).resume(3)
    monkeypatch.undo()
    assert iterations_of(path) == ([1, 2, 3, 4, 5] if at == "before" else [1, 2, 3])
    MetricsFile(path).resume(3)
    assert iterations_of(path) == [1, 2, 3]


def test_a_full_disk_warns_once_and_loses_nothing(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    file = write(path, [1])
    before = path.read_bytes()

    class Full:
        """A file that takes ten bytes and then has no room left."""

        def __init__(self, raw):
            self.raw, self.room = raw, 10

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self.raw.close()

        def __getattr__(self, name):
            return getattr(self.raw, name)

        def write(self, data):
            if self.room <= 0:
                raise OSError(28, "No space left on device")
            self.room -= 10
            return self.raw.write(data[:10])

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        real = module.open_to_append
        patch.setattr(module, "open_to_append", lambda *args, **kwargs: Full(real(*args, **kwargs)))
        for iteration in (2, 3):
            file.append(record(iteration))
            file.flush()
        assert path.read_bytes() == before  # no torn line stays
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    file.append(record(4))
    file.flush()  # there is room again
    assert iterations_of(path) == [1, 2, 3, 4]


def test_records_that_do_not_fit_in_memory_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(MetricsFile, "MAX_WAITING", 2)
    (tmp_path / "save").write_text("a file where the directory should be")
    file = MetricsFile(tmp_path / "save" / "metrics.jsonl")
    for iteration in (1, 2, 3, 4, 5):
        file.append(record(iteration))
        file.flush()
    (tmp_path / "save").unlink()
    file.flush()
    assert iterations_of(file.path) == [1, 2]
    assert caplog.messages[1:] == [f"{file.path} can be written again; the last 3 records did not fit in memory"]
    file.append(record(6))
    file.flush()
    assert iterations_of(file.path) == [1, 2, 6] and len(caplog.messages) == 2


def test_an_unwritable_directory_warns_once(tmp_path, caplog):
    (tmp_path / "save").write_text("a file where the directory should be")
    file = MetricsFile(tmp_path / "save" / "metrics.jsonl")
    file.resume(0)
    for iteration in (1, 2, 3):
        file.append(record(iteration))
        file.flush()
    assert len(caplog.records) == 1
    assert "metrics.jsonl" in caplog.text


# NaN


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_check_finite_names_rank_iteration_and_value(bad, wrap):
    with pytest.raises(NonFiniteError, match=rf"rank 3, iteration 17 \(samples from 128 on\): lm loss is {bad}"):
        check_finite({"aux": wrap(1.0), "lm loss": wrap(bad)}, iteration=17, rank=3, consumed_samples=128)


def test_check_finite_finds_the_first_bad_element():
    values = torch.ones(4, 5)
    values[1, 2], values[3, 0] = math.inf, math.nan
    with pytest.raises(NonFiniteError, match=r"grad\[7 of 20\] is inf"):
        check_finite({"grad": values}, iteration=1, rank=0)


def test_check_finite_lets_finite_values_pass():
    check_finite({"a": 1.0, "b": torch.ones(3), "c": torch.tensor(2), "d": torch.zeros(0)}, iteration=1, rank=0)


def test_texts_that_look_like_numbers_stay_texts():
    record = SAMPLE.record(3, 24, {"number": 1, "prompt": "inf", "text": "nan"})
    assert decode(encode(record)) == record
