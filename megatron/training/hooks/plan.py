"""Comparison of the measured step time with the plan, once after a warm-up."""

from __future__ import annotations

import logging
from collections import Counter

from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.evaluation import EVALUATION
from megatron.training.observe.kinds.plan import PLAN
from megatron.training.observe.kinds.sample import GENERATION
from megatron.training.observe.kinds.save import SAVE
from megatron.training.observe.kinds.train import INTERVAL, TRAIN
from megatron.training.observe.plan_comparison import Prediction, compare, message
from megatron.training.observe.records import Record, RecordKind, RunInfo

logger = logging.getLogger(__name__)

APART = {
    EVALUATION: ("evaluation", "seconds"),
    GENERATION: ("samples", "seconds"),
    SAVE: ("checkpoint saving", "stall_seconds"),
}
"""Name and field of times outside of iterations."""


WARM_UP, ENOUGH = 10, 20
"""Iterations that are not compared, and then those that are."""


class PlanHook(Hook):
    """Compares the iterations after a warm-up with the plan, once: emits a record of kind ``plan``, and warns if they
    take longer than planned. Intervals with a skipped iteration or with another batch than the plan do not count."""

    kinds = (TRAIN, INTERVAL, *APART)

    def __init__(self, prediction: Prediction, global_batch_size: int) -> None:
        self.prediction, self.global_batch_size = prediction, global_batch_size
        self.is_planned, self.is_done = True, False
        self.steps, self.seconds = 0, 0.0
        self.parts: Counter[str] = Counter()
        self.apart: Counter[str] = Counter()

    def on_start(self, run: RunInfo) -> None:
        self.run, self.first_iteration = run, run.state.iteration + 1

    def on_record(self, kind: RecordKind, record: Record) -> None:
        if kind is TRAIN:
            is_other = record["skipped"] or record["global_batch_size"] != self.global_batch_size or "plan" in record
            self.is_planned = self.is_planned and not is_other
        elif kind is INTERVAL:
            first = record["iteration"] - record["iterations"] + 1
            if self.is_planned and not self.is_done and first >= self.first_iteration + WARM_UP:
                self._add(record)
            self.is_planned = True
        elif self.steps:
            name, field = APART[kind]
            self.apart[name] += record[field]

    def _add(self, record: Record) -> None:
        self.steps += record["iterations"]
        self.seconds += record["seconds"]
        for name, value in record["parts_seconds"].items():
            self.parts[name] += value * record["iterations"]
        if self.steps < ENOUGH:
            return
        self.is_done = True
        parts, apart = ({name: total / self.steps for name, total in sums.items()} for sums in (self.parts, self.apart))
        comparison = compare(self.prediction, self.seconds / self.steps, parts, apart)
        self.run.emit(PLAN, comparison)
        if comparison["measured_seconds"] > comparison["limit_seconds"]:
            logger.warning("WARNING: %s", message(comparison, self.prediction))
