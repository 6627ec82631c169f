"""A training loop without a model: what it measures is a function of the iteration."""

import math

import pytest
import torch

from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hooks, RunInfo
from megatron.training.observe.metrics import EvalResult, StepMetrics
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
        hooks = [hooks if isinstance(hooks, Hooks) else Hooks(1, hooks)]
        info = self.info(first - 1)
        state = info.state
        for hook in hooks:
            hook.on_train_start(info)
        for iteration in range(first, last + 1):
            state.iteration, state.consumed_train_samples = iteration, iteration * BATCH
            state.floating_point_operations = iteration * 1e12
            measured = metrics(iteration)
            for hook in hooks:
                hook.on_step(state, measured)
            if every(self.eval_interval, iteration):
                self.evaluate(hooks, state)
            if every(self.save_interval, iteration):
                for hook in hooks:
                    hook.on_save(state)
                for hook in hooks:
                    hook.on_saved(state)
        if not crash:
            for hook in hooks:
                hook.on_train_end(state)

    def evaluate(self, hooks, state, name="validation", final=False):
        results = [EvalResult(name, None, {"lm loss": 20.0 / math.sqrt(state.iteration)}, final)]
        for hook in hooks:
            hook.on_evaluate(state, results)


@pytest.fixture
def simulated_run():
    return SimulatedRun
