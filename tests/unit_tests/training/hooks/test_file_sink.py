"""Files of records: the same bytes however often a run was interrupted, and complete before each checkpoint."""

import pytest

from megatron.core.timers import Timers
from megatron.training.hooks.base import Hook, Hooks
from megatron.training.hooks.console import ConsoleHook
from megatron.training.hooks.sinks import FileSink
from megatron.training.hooks.timing import TimingHook
from megatron.training.observe.kinds.evaluation import EvalResult, evaluation_records
from megatron.training.observe.kinds.process import END
from megatron.training.observe.kinds.save import SAVING
from megatron.training.observe.metrics import read_metrics
from megatron.training.observe.plan_comparison import Prediction
from megatron.training.observe.records import RecordKind, kinds


def recorder(folder, log_interval=5):
    return Hooks(log_interval, [FileSink(folder), TimingHook(Timers())])


def metrics_of(folder):
    return list(read_metrics(folder / "metrics.jsonl"))


@pytest.mark.parametrize("log_interval", [1, 4, 100])
@pytest.mark.parametrize(("stop", "crash_at"), [(10, 10), (10, 17), (5, 5), (15, 16), (0, 3)])
def test_interrupted_and_resumed_runs_write_the_bytes_of_one_run(tmp_path, simulated_run, log_interval, stop, crash_at):
    run = simulated_run(train_iters=20, eval_interval=4, save_interval=5)
    run.train(recorder(tmp_path / "once", log_interval), 1, 20)
    resumed = tmp_path / "resumed"
    run.train(recorder(resumed, log_interval), 1, crash_at, crash=crash_at > stop)
    run.train(recorder(resumed, log_interval), stop + 1, 20)
    assert (resumed / "metrics.jsonl").read_bytes() == (tmp_path / "once" / "metrics.jsonl").read_bytes()


def test_a_finished_run_that_is_extended_keeps_no_final_evaluation(tmp_path, simulated_run):
    run = simulated_run(eval_interval=4)
    run.train(recorder(tmp_path / "once"), 1, 20)
    hooks = recorder(tmp_path / "resumed")
    run.train(hooks, 1, 10, crash=True)
    run.evaluate(hooks, run.state_at(10), final=True)
    run.evaluate(hooks, run.state_at(10), "test", final=True)
    hooks.on_end()
    assert [record["kind"] for record in metrics_of(tmp_path / "resumed")][-2:] == ["valid", "test"]
    run.train(recorder(tmp_path / "resumed"), 11, 20)
    assert (tmp_path / "resumed/metrics.jsonl").read_bytes() == (tmp_path / "once/metrics.jsonl").read_bytes()


def test_all_records_are_on_disk_before_the_checkpoint(tmp_path, simulated_run):
    observed = []

    class Checkpoint(Hook):
        kinds = (SAVING,)

        def on_record(self, kind, record):
            observed.append([record["iteration"] for record in metrics_of(tmp_path)])

    simulated_run(save_interval=3).train(Hooks(100, [FileSink(tmp_path), Checkpoint(), ConsoleHook()]), 1, 6)
    assert observed == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]


def test_validation_records_follow_their_iteration(tmp_path, simulated_run):
    simulated_run(eval_interval=2).train(recorder(tmp_path), 1, 4)
    order = [(record["kind"], record["iteration"]) for record in metrics_of(tmp_path)]
    assert order == [("train", 1), ("train", 2), ("valid", 2), ("train", 3), ("train", 4), ("valid", 4)]


def test_an_evaluation_without_training_removes_no_records_and_records_no_start(tmp_path, simulated_run):
    simulated_run().train(recorder(tmp_path), 1, 8)
    run, hooks = simulated_run(trains=False), recorder(tmp_path)
    hooks.on_start(run.info(4))  # evaluates an older checkpoint
    run.evaluate(hooks, run.state_at(4), final=True)
    assert [record["iteration"] for record in metrics_of(tmp_path)] == [*range(1, 9), 4]
    assert [record["kind"] for record in read_metrics(tmp_path / "timing.jsonl")].count("start") == 1


def test_timing_has_one_record_per_log_point(tmp_path, simulated_run):
    timers = Timers(1)
    timers("optimizer", log_level=1)._elapsed = 0.5
    run = simulated_run(rank=1, world_size=2, device_name="NVIDIA H200")
    run.train(Hooks(5, [FileSink(tmp_path), TimingHook(timers)]), 1, 10)
    records = [record for record in read_metrics(tmp_path / "timing.jsonl") if record["kind"] == "timing"]
    assert [(record["iteration"], record["iterations"]) for record in records] == [(1, 1), (5, 4), (10, 5)]
    last = records[-1]
    assert last["seconds_per_iteration"] == 0.25 and last["tokens_per_second"] == 2048.0
    assert last["tflops_per_device"] == 2.0 and last["mfu"] == pytest.approx(2.0 / 989.4)
    assert last["world_size"] == 2 and last["memory"]["mem-resident-bytes"] > 0
    assert records[0]["timers_ms"] == {"optimizer": 500.0}


def test_each_file_holds_its_kinds_of_records(tmp_path, simulated_run):
    hooks, run = recorder(tmp_path), simulated_run(eval_interval=2, save_interval=2)
    run.train(hooks, 1, 2, crash=True)
    hooks.emit(END, {"ending": "stopped", "reason": "time is up"})
    hooks.on_end()
    kinds = {name: [record["kind"] for record in read_metrics(tmp_path / name)]
             for name in ("metrics.jsonl", "timing.jsonl")}  # fmt: skip
    # the evaluation of this simulation takes no time, and gets no record of it
    assert kinds == {"metrics.jsonl": ["train", "train", "valid"], "timing.jsonl": ["start", "timing", "save", "end"]}


def test_the_start_of_a_process_records_its_settings_and_its_plan(tmp_path, simulated_run):
    plan = Prediction("H100", 0.5, {"GEMM": 0.5}, 0.03)
    run = simulated_run(settings={"lr": 1e-3}, environment={"torch": "2"}, prediction=plan, world_size=4, train_iters=9)
    hooks = Hooks(5, [FileSink(tmp_path)])
    hooks.on_start(run.info(5))
    (record,) = read_metrics(tmp_path / "timing.jsonl")  # written at once: it outlives a process that is killed
    assert record["settings"] == {"lr": 1e-3} and record["environment"] == {"torch": "2"}
    assert record["prediction"] == {"gpu": "H100", "seconds": 0.5, "parts": {"GEMM": 0.5}, "error": 0.03}
    assert (record["iteration"], record["train_iters"], record["world_size"]) == (5, 9, 4)
    results = [EvalResult("validation", name, {"lm loss": 1.0}, seconds=2.0) for name in ("a", "b")]
    for kind, values in evaluation_records(results):
        hooks.emit(kind, values, run.state_at(6))
    hooks.emit(END, {"ending": "failed", "reason": "RuntimeError: x"}, run.state_at(7))
    hooks.on_end()
    _, evaluation, end = read_metrics(tmp_path / "timing.jsonl")
    assert evaluation["seconds"] == 4.0
    assert (end["kind"], end["iteration"], end["ending"], end["reason"]) == ("end", 7, "failed", "RuntimeError: x")


def test_timers_are_printed_by_the_last_rank_only(simulated_run, capsys):
    for rank in (0, 1):
        timers = Timers(1)
        timers("optimizer", log_level=1)._elapsed = 0.5
        simulated_run(rank=rank, world_size=2).train([ConsoleHook(), TimingHook(timers)], 1, 1)
        assert ("(min, max) time across ranks (ms):" in capsys.readouterr().out) == (rank == 1)


def test_a_kind_that_is_first_emitted_during_the_run_gets_its_file(tmp_path, simulated_run, monkeypatch):
    late = RecordKind(name="late", fields={"x": "number"}, file="late.jsonl", flush="write")
    hooks = recorder(tmp_path)
    hooks.on_start(simulated_run().info())
    monkeypatch.setitem(kinds(), "late", late)  # removed after the test
    hooks.emit(late, {"x": 1.5})
    (record,) = read_metrics(tmp_path / "late.jsonl")
    assert record["kind"] == "late" and record["x"] == 1.5 and "time" in record
    hooks.on_end()
