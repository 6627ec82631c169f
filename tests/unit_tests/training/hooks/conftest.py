"""A training loop without a model: what it measures is a function of the iteration."""

import math

import pytest
import torch

from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hooks
from megatron.training.observe.kinds.evaluation import EvalResult, evaluation_records
from megatron.training.observe.kinds.save import SAVE, SAVING, save_values
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import RunInfo
from megatron.training.train_state import TrainState

BATCH, TOKENS = 8, 512


def step_metrics(iteration, **changed):
    values = {
        "losses": {"lm loss": torch.tensor(10.0 / iteration)},
        "num_tokens": torch.tensor(TOKENS),
        "learning_rate": 1e-3 * iteration,
        "global_batch_size": BATCH,
        "loss_scale": 1.0,
        "grad_norm": torch.tensor(1.0 + iteration),
        "elapsed": 0.25,
    }
    return StepMetrics(**(values | changed))


class SimulatedRun:
    """Calls hooks as the trainer does: steps, evaluations, checkpoints, from any iteration to any other."""

    def __init__(self, train_iters=100, eval_interval=None, save_interval=None, **run_info):
        self.train_iters, self.eval_interval, self.save_interval = train_iters, eval_interval, save_interval
        self.run_info = run_info

    def state_at(self, iteration):
        return TrainState(iteration, iteration * BATCH, floating_point_operations=iteration * 1e12)

    def info(self, iteration=0):
        return RunInfo(state=self.state_at(iteration), train_iters=self.train_iters, **self.run_info)

    def train(self, hooks, first, last, crash=False, metrics=step_metrics):
        """Iterations ``first`` to ``last``; a crash skips the final calls. ``hooks``: as :class:`Hooks`, or a list."""
        hooks = hooks if isinstance(hooks, Hooks) else Hooks(1, hooks)
        info = self.info(first - 1)
        state = info.state
        hooks.on_start(info)
        for iteration in range(first, last + 1):
            state.iteration, state.consumed_train_samples = iteration, iteration * BATCH
            state.floating_point_operations = iteration * 1e12
            hooks.on_step(state, metrics(iteration))
            if every(self.eval_interval, iteration):
                self.evaluate(hooks, state)
            if every(self.save_interval, iteration):
                hooks.emit(SAVING, {})
                hooks.emit(SAVE, save_values(seconds=2.0, stall=0.5, num_bytes=10**9, background=False))
        if not crash:
            hooks.on_end()

    def evaluate(self, hooks, state, name="validation", final=False, seconds=0.0):
        result = EvalResult(name, None, {"lm loss": 20.0 / math.sqrt(state.iteration)}, final, seconds)
        for kind, values in evaluation_records([result]):
            hooks.emit(kind, values, state)


@pytest.fixture
def simulated_run():
    return SimulatedRun
