"""Log intervals: sums of their iterations; an interval of invalid iterations starts the next one, too."""

import pytest

from megatron.training.hooks.interval import Interval
from megatron.training.observe.throughput import Throughput
from megatron.training.train_state import TrainState
from tests.unit_tests.training.hooks.conftest import step_metrics

RATES = Throughput(2, "CPU")


def state_at(iteration):
    return TrainState(iteration, 8 * iteration, floating_point_operations=3e12 * iteration, skipped_train_samples=5)


def run_interval(interval, first, last, **changed):
    """Add iterations; return the values of the interval at the last one."""
    for iteration in range(first, last + 1):
        interval.add(state_at(iteration), step_metrics(iteration, **changed))
    interval.unseen()
    return interval.close(state_at(last), RATES)


def test_an_interval_adds_up_its_iterations_after_a_resume():
    interval = Interval(10)
    interval.start(state_at(40))
    values = run_interval(interval, 41, 44, elapsed=0.5)
    assert values["iterations"] == 4 and values["seconds"] == 2.0 and values["skipped_samples"] == 5
    assert values["tokens_per_second"] == 4 * 512 / 2.0 and values["tflops_per_device"] == 4 * 3.0 / 2.0 / 2
    assert values["losses"]["lm loss"] == pytest.approx(sum(10 / i for i in range(41, 45)) / 4)
    assert values["grad_norm"] == 45.0 and values["parts_seconds"] == {} and values["mfu"] is None
    values = run_interval(interval, 45, 46, skipped=True)
    assert values["tflops_per_device"] == 2 * 3.0 / 0.5 / 2 and values["num_skipped"] == 2 and values["losses"] == {}


def test_iterations_with_nan_are_counted():
    interval = Interval(2)
    interval.start(TrainState())
    assert run_interval(interval, 1, 2, losses={"lm loss": float("nan")})["num_nan"] == 2


def test_flops_of_invalid_iterations_do_not_count_in_the_next_interval():
    interval = Interval(10)
    interval.start(state_at(0))
    assert run_interval(interval, 1, 3, invalid=True) is None
    assert run_interval(interval, 4, 5, elapsed=1.0)["tflops_per_device"] == 2 * 3.0 / 2.0 / 2
