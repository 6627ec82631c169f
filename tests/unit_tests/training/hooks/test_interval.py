"""Log intervals: sums of their iterations; an interval of invalid iterations starts the next one, too."""

import pytest

from megatron.training.hooks.interval import Interval
from megatron.training.train_state import TrainState
from tests.unit_tests.training.hooks.conftest import step_metrics


def state_at(iteration):
    return TrainState(iteration, 8 * iteration, floating_point_operations=3.0 * iteration, skipped_train_samples=5)


def run_interval(interval, first, last, **changed):
    """Add iterations; return the summary at the last one."""
    for iteration in range(first, last + 1):
        interval.add(state_at(iteration), step_metrics(iteration, **changed))
    interval.unseen()
    return interval.close(state_at(last))


def test_a_summary_adds_up_its_iterations_after_a_resume():
    interval = Interval(10)
    interval.start(state_at(40))
    summary = run_interval(interval, 41, 44, elapsed=0.5)
    assert (summary.iteration, summary.consumed_samples, summary.elapsed) == (44, 352, 2.0)
    assert summary.elapsed_per_iteration == 0.5 and summary.num_tokens == 4 * 512
    assert summary.flops == 4 * 3.0 and summary.skipped_samples == 5
    assert summary.losses["lm loss"] == pytest.approx(sum(10 / i for i in range(41, 45)) / 4)
    summary = run_interval(interval, 45, 46, skipped=True)
    assert summary.flops == 2 * 3.0 and summary.num_skipped == 2 and summary.losses == {}


def test_flops_of_invalid_iterations_do_not_count_in_the_next_interval():
    interval = Interval(10)
    interval.start(state_at(0))
    assert run_interval(interval, 1, 3, invalid=True) is None
    assert run_interval(interval, 4, 5).flops == 2 * 3.0
