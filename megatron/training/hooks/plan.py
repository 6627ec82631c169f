"""Comparison of the measured step time with the plan, once after a warm-up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.interval import IntervalSummary
from megatron.training.observe.metrics import EvalResult, MetricsFile, Record, Sample
from megatron.training.observe.plan_comparison import Comparison, PlanWatch, Prediction
from megatron.training.observe.step_parts import mean_parts
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


class PlanHook(Hook):
    """Warns once if iterations take longer than planned, and appends a record of kind ``plan`` to ``file``."""

    def __init__(self, prediction: Prediction, global_batch_size: int, file: MetricsFile | None) -> None:
        self.prediction, self.global_batch_size, self.file = prediction, global_batch_size, file
        self.watch = PlanWatch(prediction, 1)

    def on_train_start(self, run: RunInfo) -> None:
        self.watch = PlanWatch(self.prediction, run.state.iteration + 1)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        """Add the iterations of an interval, unless one was skipped or has another batch size than the plan."""
        for step in summary.steps:
            if step.metrics.skipped or step.metrics.global_batch_size != self.global_batch_size or step.metrics.plan:
                return
        parts = mean_parts([step.metrics.step_marks for step in summary.steps])
        comparison = self.watch.add(summary.steps[0].iteration, len(summary.steps), summary.elapsed, parts)
        if comparison is None:
            return
        if self.file is not None:
            self.file.append(plan_record(summary, comparison))
        if comparison.is_slower:
            logger.warning("WARNING: %s", comparison.message(self.prediction))

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        self.watch.add_apart("evaluation", sum(result.seconds for result in results))

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> None:
        self.watch.add_apart("samples", sum(sample.seconds for sample in samples))

    def on_save_timed(self, record: Record) -> None:
        self.watch.add_apart("checkpoint saving", record["stall_seconds"])


def plan_record(summary: IntervalSummary, comparison: Comparison) -> Record:
    """Return the record of the comparison: seconds per iteration, predicted and measured, in total and by part."""
    return {
        "kind": "plan",
        "iteration": summary.iteration,
        "consumed_samples": summary.consumed_samples,
        "time": time.time(),
        "predicted_seconds": comparison.predicted,
        "measured_seconds": comparison.measured,
        "limit_seconds": comparison.limit,
        "parts_seconds": {name: {"predicted": a, "measured": b} for name, (a, b) in comparison.parts.items()},
        "apart_seconds": comparison.apart,
    }
