"""The hook that compares a run with its plan: one warning, one record, only for iterations that the plan describes."""

import logging

import pytest

from megatron.training.hooks.base import Hooks
from megatron.training.hooks.plan import PlanHook
from megatron.training.hooks.sinks import FileSink
from megatron.training.observe.kinds.evaluation import EVALUATION
from megatron.training.observe.kinds.train import INTERVAL
from megatron.training.observe.metrics import read_metrics
from megatron.training.observe.plan_comparison import Prediction
from megatron.training.observe.records import RunInfo
from megatron.training.observe.step_parts import StepMarks, mark, mean_parts
from megatron.training.train_state import TrainState
from tests.unit_tests.training.hooks.conftest import BATCH, step_metrics

PREDICTION = Prediction("H100", 0.2, {"GEMM": 0.18, "optimizer": 0.02}, error=0.03)


def marked(iteration, **changed):
    return step_metrics(iteration, step_marks=StepMarks(0.0, 0.2, 0.22, 0.01, 0.1), **changed)


def watched(tmp_path, simulated_run, prediction=PREDICTION, metrics=marked):
    hooks = Hooks(5, [FileSink(tmp_path), PlanHook(prediction, BATCH)])
    simulated_run().train(hooks, 1, 60, metrics=metrics)
    return [record for record in read_metrics(tmp_path / "timing.jsonl") if record["kind"] == "plan"]


def test_a_slow_run_warns_once_and_records_the_parts(tmp_path, simulated_run, caplog):
    (record,) = watched(tmp_path, simulated_run)  # iterations of 0.25 s
    assert record["kind"] == "plan" and record["iteration"] == 30
    assert record["predicted_seconds"] == 0.2 and record["measured_seconds"] == pytest.approx(0.25)
    assert record["parts_seconds"]["forward and backward"] == pytest.approx({"predicted": 0.18, "measured": 0.2})
    (warning,) = (item for item in caplog.records if item.levelno == logging.WARNING)
    assert "planned on H100: 0.2 s (+25%" in warning.getMessage()


def test_a_run_as_planned_is_recorded_and_warns_nothing(tmp_path, simulated_run, caplog):
    (record,) = watched(tmp_path, simulated_run, PREDICTION._replace(seconds=0.24))
    assert record["limit_seconds"] > record["measured_seconds"]
    assert not caplog.records


@pytest.mark.parametrize("changed", [{"global_batch_size": BATCH // 2}, {"skipped": True}])
def test_iterations_that_the_plan_does_not_describe_do_not_count(tmp_path, simulated_run, changed):
    def metrics(iteration):
        return marked(iteration, **(changed if iteration % 5 == 0 else {}))

    assert watched(tmp_path, simulated_run, metrics=metrics) == []


def test_time_of_saves_and_evaluations_is_apart(tmp_path, simulated_run, monkeypatch):
    run = simulated_run(eval_interval=20, save_interval=20)
    evaluate = run.evaluate
    monkeypatch.setattr(run, "evaluate", lambda hooks, state: evaluate(hooks, state, seconds=3.0))
    run.train(Hooks(5, [FileSink(tmp_path), PlanHook(PREDICTION, BATCH)]), 1, 40, metrics=marked)
    (record,) = (record for record in read_metrics(tmp_path / "timing.jsonl") if record["kind"] == "plan")
    times = {"evaluation": pytest.approx(3 / 20), "checkpoint saving": pytest.approx(0.5 / 20)}
    assert record["apart_seconds"] == times


def test_the_plan_is_compared_once_after_the_warm_up():
    """Intervals of a run that resumed at iteration 100."""
    emitted, hook = [], PlanHook(PREDICTION, BATCH)
    emit = lambda kind, values: emitted.append(values)  # noqa: E731
    hook.on_start(RunInfo(state=TrainState(100), train_iters=300, emit=emit))

    def add(first, number, seconds, update):
        parts = {"forward_backward": 0.85, "update": update, "data_wait": 0.2, "device_wait": 0.5}
        values = {"iterations": number, "seconds": seconds, "parts_seconds": parts}
        hook.on_record(INTERVAL, INTERVAL.record(first + number - 1, 0, values))

    add(101, 1, 60.0, 0.15)  # compiles
    add(102, 9, 90.0, 0.15)
    hook.on_record(EVALUATION, EVALUATION.record(110, 0, {"seconds": 100.0}))  # in the warm-up
    add(111, 10, 13.0, 0.15)
    hook.on_record(EVALUATION, EVALUATION.record(120, 0, {"seconds": 4.0}))
    add(121, 10, 11.0, 0.35)
    add(131, 50, 500.0, 0.15)
    (comparison,) = emitted
    assert comparison["measured_seconds"] == pytest.approx(1.2) and comparison["apart_seconds"] == {"evaluation": 0.2}
    assert comparison["parts_seconds"]["update"]["measured"] == pytest.approx(0.25)


class Event:
    """A device's event: its time in seconds, and whether the device has reached it."""

    def __init__(self, at, reached=True):
        self.at, self.reached = at, reached

    def query(self):
        return self.reached

    def elapsed_time(self, other):
        return (other.at - self.at) * 1000.0


def test_parts_are_means_over_the_iterations_that_the_device_has_finished():
    steps = [
        StepMarks(Event(0.0), Event(0.6), Event(0.7), 0.1, 0.4),
        StepMarks(Event(1.0), Event(1.8), Event(2.0), 0.3, 0.2),
        StepMarks(Event(2.0), Event(2.5), Event(0.0, reached=False), 9.0, 9.0),
        None,
    ]
    expected = {"forward_backward": 0.7, "update": 0.15, "data_wait": 0.2, "device_wait": 0.3}
    assert mean_parts(steps) == pytest.approx(expected)
    assert mean_parts([None]) == {} and mean_parts([]) == {}


def test_marks_of_a_cpu_are_clock_readings():
    first, second = mark(False), mark(False)
    assert isinstance(first, float) and second >= first
