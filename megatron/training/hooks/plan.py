"""Comparison of the measured step time with the plan, once after a warm-up."""

from __future__ import annotations

import logging

from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.evaluation import EVALUATION
from megatron.training.observe.kinds.plan import PLAN, plan_values
from megatron.training.observe.kinds.sample import GENERATION
from megatron.training.observe.kinds.save import SAVE
from megatron.training.observe.kinds.train import INTERVAL, TRAIN
from megatron.training.observe.metrics import Record
from megatron.training.observe.plan_comparison import PlanWatch, Prediction
from megatron.training.observe.records import RecordKind, RunInfo

logger = logging.getLogger(__name__)

APART = {
    EVALUATION: ("evaluation", "seconds"),
    GENERATION: ("samples", "seconds"),
    SAVE: ("checkpoint saving", "stall_seconds"),
}
"""Name and field of times outside of iterations."""


class PlanHook(Hook):
    """Warns once if iterations take longer than planned, and emits a record of kind ``plan``."""

    kinds = (TRAIN, INTERVAL, *APART)

    def __init__(self, prediction: Prediction, global_batch_size: int) -> None:
        self.prediction, self.global_batch_size = prediction, global_batch_size
        self.is_planned = True
        """Whether no iteration of the interval was skipped or has another batch than the plan."""

    def on_start(self, run: RunInfo) -> None:
        self.run, self.watch = run, PlanWatch(self.prediction, run.state.iteration + 1)

    def on_record(self, kind: RecordKind, record: Record) -> None:
        if kind is TRAIN:
            is_other = record["skipped"] or record["global_batch_size"] != self.global_batch_size or "plan" in record
            self.is_planned = self.is_planned and not is_other
        elif kind is INTERVAL:
            if self.is_planned:
                self._compare(record)
            self.is_planned = True
        else:
            name, field = APART[kind]
            self.watch.add_apart(name, record[field])

    def _compare(self, record: Record) -> None:
        number = record["iterations"]
        first = record["iteration"] - number + 1
        comparison = self.watch.add(first, number, record["seconds"], record["parts_seconds"])
        if comparison is None:
            return
        self.run.emit(PLAN, plan_values(comparison))
        if comparison.is_slower:
            logger.warning("WARNING: %s", comparison.message(self.prediction))
