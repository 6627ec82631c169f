"""The counters of a run after one iteration."""

import pytest

from megatron.training.observe.metrics import StepMetrics
from megatron.training.train_state import TrainState
from megatron.training.trainer import Trainer


@pytest.mark.parametrize(
    "losses, skipped, count",
    [({"lm loss": 1.0}, False, 0), ({"lm loss": 1.0}, True, 1), ({}, True, 0)],  # the last: --iterations-to-skip
)
def test_only_refused_updates_count_as_skipped_iterations(losses, skipped, count):
    trainer = Trainer.__new__(Trainer)
    trainer.state, trainer.flops_per_sample = TrainState(), 3.0
    metrics = StepMetrics(losses=losses, num_tokens=8, learning_rate=0.0, global_batch_size=4, skipped=skipped)
    trainer._count(4, metrics)
    assert trainer.state == TrainState(
        iteration=1, consumed_train_samples=4, skipped_iterations=count, floating_point_operations=12.0
    )
