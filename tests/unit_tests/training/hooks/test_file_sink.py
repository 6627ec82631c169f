"""metrics.jsonl of a run: the same bytes however often it was interrupted, and there before each checkpoint."""

import pytest

from megatron.core.timers import Timers
from megatron.training.hooks.base import Hooks
from megatron.training.hooks.console import ConsoleHook, TimersHook
from megatron.training.hooks.sinks import Clock, FileSink
from megatron.training.observe.metrics import EvalResult, MetricsFile, read_metrics, save_record
from megatron.training.observe.plan_comparison import Prediction
from megatron.training.observe.throughput import Throughput


def recorder(path, log_interval=5, trains=True):
    clock = Clock(Throughput(1, "CPU"), Timers())
    return Hooks(log_interval, [FileSink(MetricsFile(path), ("train", "valid", "test"), clock, trains)])


@pytest.mark.parametrize("log_interval", [1, 4, 100])
@pytest.mark.parametrize(("stop", "crash_at"), [(10, 10), (10, 17), (5, 5), (15, 16), (0, 3)])
def test_interrupted_and_resumed_runs_write_the_bytes_of_one_run(tmp_path, simulated_run, log_interval, stop, crash_at):
    run = simulated_run(train_iters=20, eval_interval=4, save_interval=5)
    run.train([recorder(tmp_path / "whole", log_interval)], 1, 20)
    path = tmp_path / "resumed"
    run.train([recorder(path, log_interval)], 1, crash_at, crash=crash_at > stop)
    run.train([recorder(path, log_interval)], stop + 1, 20)
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_finished_run_that_is_extended_keeps_no_final_evaluation(tmp_path, simulated_run):
    run = simulated_run(eval_interval=4)
    run.train([recorder(tmp_path / "whole")], 1, 20)
    hooks = [recorder(tmp_path / "resumed")]
    run.train(hooks, 1, 10)
    run.evaluate(hooks, run.state_at(10), final=True)
    run.evaluate(hooks, run.state_at(10), "test", final=True)
    assert [record["kind"] for record in read_metrics(tmp_path / "resumed")][-2:] == ["valid", "test"]
    run.train([recorder(tmp_path / "resumed")], 11, 20)
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_all_records_are_on_disk_before_the_checkpoint(tmp_path, simulated_run):
    path = tmp_path / "metrics.jsonl"
    seen = []

    class Checkpoint(ConsoleHook):
        def on_save(self, state):
            seen.append([record["iteration"] for record in read_metrics(path)])

    simulated_run(save_interval=3).train([recorder(path, 100), Checkpoint()], 1, 6)
    assert seen == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]


def test_validation_records_follow_their_iteration(tmp_path, simulated_run):
    path = tmp_path / "metrics.jsonl"
    simulated_run(eval_interval=2).train([recorder(path)], 1, 4)
    order = [(record["kind"], record["iteration"]) for record in read_metrics(path)]
    assert order == [("train", 1), ("train", 2), ("valid", 2), ("train", 3), ("train", 4), ("valid", 4)]


def test_skip_train_cuts_nothing(tmp_path, simulated_run):
    path = tmp_path / "metrics.jsonl"
    run = simulated_run()
    run.train([recorder(path)], 1, 8)
    hooks = [recorder(path, trains=False)]
    hooks[0].on_train_start(run.info(4))  # evaluates an older checkpoint
    run.evaluate(hooks, run.state_at(4), final=True)
    assert [record["iteration"] for record in read_metrics(path)] == [*range(1, 9), 4]


def test_timing_has_one_record_per_log_point(tmp_path, simulated_run):
    path = tmp_path / "timing.jsonl"
    timers = Timers(1)
    timers("optimizer", log_level=1)._elapsed = 0.5
    clock = Clock(Throughput(2, "NVIDIA H200"), timers)
    simulated_run().train(Hooks(5, [TimersHook(timers), FileSink(MetricsFile(path), ("timing",), clock)]), 1, 10)
    records = list(read_metrics(path))
    assert [(record["iteration"], record["iterations"]) for record in records] == [(1, 1), (5, 4), (10, 5)]
    last = records[-1]
    assert last["seconds_per_iteration"] == 0.25 and last["tokens_per_second"] == 2048.0
    assert last["tflops_per_device"] == 2.0 and last["mfu"] == pytest.approx(2.0 / 989.4)
    assert last["world_size"] == 2 and last["memory"]["mem-resident-bytes"] > 0
    assert records[0]["timers_ms"] == {"optimizer": 500.0}


def test_each_file_holds_its_kinds_of_records(tmp_path, simulated_run):
    clock = Clock(Throughput(1, "CPU"), Timers())
    kinds = {
        "metrics": ("train", "valid", "test"),
        "timing": ("timing", "save", "start", "end", "evaluation"),
    }
    hooks = Hooks(5, [FileSink(MetricsFile(tmp_path / name), each, clock) for name, each in kinds.items()])
    simulated_run(eval_interval=2).train(hooks, 1, 2)
    hooks.on_stop(simulated_run().state_at(2), "stopped", "time is up")
    hooks.on_save_timed(save_record(2, 16, seconds=2.0, stall=0.5, num_bytes=10**9, background=False))
    found = {name: [record["kind"] for record in read_metrics(tmp_path / name)] for name in kinds}
    # the evaluation of this simulation takes no time, and gets no record
    assert found == {"metrics": ["train", "train", "valid"], "timing": ["start", "timing", "end", "save"]}


def test_the_start_of_a_process_records_its_settings_and_its_plan(tmp_path, simulated_run):
    clock, plan = Clock(Throughput(1, "CPU"), Timers()), Prediction("H100", 0.5, {"GEMM": 0.5}, 0.03)
    sink = FileSink(MetricsFile(tmp_path / "timing"), ("start", "end", "evaluation"), clock)
    run = simulated_run(settings={"lr": 1e-3}, environment={"torch": "2"}, prediction=plan, world_size=4, train_iters=9)
    sink.on_train_start(run.info(5))
    (record,) = read_metrics(tmp_path / "timing")  # written at once: it outlives a process that is killed
    assert record["settings"] == {"lr": 1e-3} and record["environment"] == {"torch": "2"}
    assert record["prediction"] == {"gpu": "H100", "seconds": 0.5, "parts": {"GEMM": 0.5}, "error": 0.03}
    assert (record["iteration"], record["train_iters"], record["world_size"]) == (5, 9, 4)
    results = [EvalResult("validation", name, {"lm loss": 1.0}, seconds=2.0) for name in ("a", "b")]
    sink.on_evaluate(run.state_at(6), results)
    sink.on_stop(run.state_at(7), "failed", "RuntimeError: x")
    sink.flush()
    _, evaluation, end = read_metrics(tmp_path / "timing")
    assert evaluation["seconds"] == 4.0
    assert (end["kind"], end["iteration"], end["ending"], end["reason"]) == ("end", 7, "failed", "RuntimeError: x")


def test_an_evaluation_without_training_records_no_start(tmp_path, simulated_run):
    sink = FileSink(MetricsFile(tmp_path / "timing"), ("start",), Clock(Throughput(1, "CPU"), Timers()), trains=False)
    sink.on_train_start(simulated_run().info(5))
    sink.flush()
    assert not (tmp_path / "timing").exists()


def test_timers_are_printed_by_the_last_rank_only(simulated_run, capsys):
    for rank in (0, 1):
        timers = Timers(1)
        timers("optimizer", log_level=1)._elapsed = 0.5
        simulated_run(rank=rank, world_size=2).train([TimersHook(timers)], 1, 1)
        assert ("(min, max) time across ranks (ms):" in capsys.readouterr().out) == (rank == 1)
