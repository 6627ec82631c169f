"""Record of the comparison of the measured step time with the plan."""

from __future__ import annotations

from megatron.training.observe.metrics import TIMING_FILE, Record
from megatron.training.observe.plan_comparison import Comparison
from megatron.training.observe.records import RecordKind

PLAN = RecordKind(
    name="plan",
    fields={
        "predicted_seconds": "planned seconds per iteration",
        "measured_seconds": "mean seconds per iteration",
        "limit_seconds": "seconds above which the run is slower than planned",
        "parts_seconds": "predicted and measured seconds by part of an iteration",
        "apart_seconds": "seconds per iteration outside of iterations: evaluation, samples, checkpoint saving",
    },
    file=TIMING_FILE,
)
KINDS = (PLAN,)


def plan_values(comparison: Comparison) -> Record:
    """Return the fields of a record of :data:`PLAN`."""
    return {
        "predicted_seconds": comparison.predicted,
        "measured_seconds": comparison.measured,
        "limit_seconds": comparison.limit,
        "parts_seconds": {name: {"predicted": a, "measured": b} for name, (a, b) in comparison.parts.items()},
        "apart_seconds": comparison.apart,
    }
