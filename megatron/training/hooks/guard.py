"""Keeps a failing sink from ending a run: a full disk or a lost server costs its points, never the training."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.interval import IntervalSummary, Step
from megatron.training.observe.metrics import EvalResult, StepMetrics
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


class Guarded(Hook):
    """Calls ``hook`` until it raises; then warns once, naming the ``flag`` that asked for it, and leaves it alone."""

    def __init__(self, hook: Hook, flag: str):
        self.hook, self.flag = hook, flag
        self.failed = False
        self.reads_metrics = hook.reads_metrics

    def on_train_start(self, run: RunInfo) -> None:
        self._call(self.hook.on_train_start, run)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        self._call(self.hook.on_step, state, metrics)

    def on_steps(self, steps: Sequence[Step]) -> None:
        self._call(self.hook.on_steps, steps)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        self._call(self.hook.on_log, state, summary)

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        self._call(self.hook.on_evaluate, state, results)

    def on_save(self, state: TrainState) -> None:
        self._call(self.hook.on_save, state)

    def on_saved(self, state: TrainState) -> None:
        self._call(self.hook.on_saved, state)

    def on_train_end(self, state: TrainState) -> None:
        self._call(self.hook.on_train_end, state)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        if self.failed:
            return
        try:
            method(*arguments)
        except Exception as error:  # whatever a third-party writer raises: training does not depend on it
            self.failed = True
            logger.warning(
                "%s: %s: %s. Training goes on without it; metrics.jsonl keeps the values",
                self.flag,
                type(error).__name__,
                error,
            )
