"""Records of ``timing.jsonl`` about a process of a run: its start, its end, and the time of evaluations and samples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

from megatron.training.observe.metrics import EvalResult, Record, Sample
from megatron.training.observe.plan_comparison import Prediction

Ending = Literal["finished", "stopped", "failed"]
"""A complete run, one that an exit condition stopped and that can continue, or an error."""


def start_record(
    iteration: int,
    consumed_samples: int,
    *,
    train_iters: int,
    world_size: int,
    settings: Mapping[str, object],
    environment: Mapping[str, str | None],
    prediction: Prediction | None,
) -> Record:
    """Return the record of a process that starts training after ``iteration``; ``settings``: those that were given or
    differ from their defaults, as JSON types."""
    record: Record = {
        "kind": "start",
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "time": time.time(),
        "train_iters": train_iters,
        "world_size": world_size,
        "environment": dict(environment),
        "settings": dict(settings),
    }
    if prediction is not None:
        record["prediction"] = prediction._asdict()
    return record


def end_record(iteration: int, consumed_samples: int, ending: Ending, reason: str) -> Record:
    """Return the record of the end of training in this process; ``reason``: one message."""
    return {
        "kind": "end",
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "time": time.time(),
        "ending": ending,
        "reason": reason,
    }


def duration_record(kind: str, iteration: int, consumed_samples: int, results: Sequence[EvalResult | Sample]) -> Record:
    """Return the record of the duration of an evaluation (kind "evaluation"), or of samples (kind "generation")."""
    return {
        "kind": kind,
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "time": time.time(),
        "seconds": sum(result.seconds for result in results),
    }
