"""Records of the start and the end of training in a process."""

from __future__ import annotations

from typing import Literal

from megatron.training.observe.metrics import TIMING_FILE, Record
from megatron.training.observe.records import RecordKind, RunInfo

Ending = Literal["finished", "stopped", "failed"]
"""A complete run, one that an exit condition stopped and that can continue, or an error."""

START = RecordKind(
    name="start",
    fields={
        "train_iters": "iterations of the run",
        "world_size": "ranks",
        "environment": "versions, host and GPUs by name",
        "settings": "settings that were given or differ from their defaults, by name",
        "prediction": "predicted seconds of a step, if the planner knows the GPU",
    },
    file=TIMING_FILE,
    flush="write",
)
END = RecordKind(
    name="end",
    fields={"ending": "finished, stopped or failed", "reason": "exit condition or error, one message"},
    file=TIMING_FILE,
    follows_steps=False,  # after an error of the device nothing can be read from it
)
KINDS = (START, END)


def start_values(run: RunInfo) -> Record:
    """Return the fields of a record of :data:`START`."""
    values: Record = {
        "train_iters": run.train_iters,
        "world_size": run.world_size,
        "environment": dict(run.environment),
        "settings": dict(run.settings),
    }
    return values if run.prediction is None else values | {"prediction": run.prediction._asdict()}
