"""Records of the start and the end of training in a process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megatron.training.observe.metrics import TIMING_FILE
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.observe.run_folder import Event, Run, number, records, table, unix_time

Ending = Literal["finished", "stopped", "failed"]
"""A complete run, one that an exit condition stopped and that can continue, or an error."""


def _read_start(run: Run, record: Record) -> None:
    iteration, when, is_restart = record["iteration"], unix_time(record), bool(run.start)
    changed = changes(table(run.start, "settings"), table(record, "settings")) if is_restart else ""
    text = f"{int(number(record, 'world_size'))} ranks" + (f"; changed settings: {changed}" if changed else "")
    if is_restart and run.status == "" and not _has_moved_end(run.folder, iteration):
        text += "; the process before recorded no end"
    run.events.append(Event(iteration, "restart" if is_restart else "start", text, when))
    run.start, run.status, run.reason = record, "", ""
    run.first_start = run.first_start or when
    run.settings, run.versions = table(record, "settings"), table(record, "environment")
    run.train_iters = int(number(record, "train_iters"))
    run.world_size = int(number(record, "world_size"))


def _has_moved_end(folder: Path, iteration: int) -> bool:
    """Whether a process that continued from ``iteration`` moved the end of an earlier one aside."""
    path = folder / f"{TIMING_FILE}.cut-{iteration}"
    return path.exists() and any(record["kind"] == "end" for record in records(path, []))


def changes(before: dict[str, object], after: dict[str, object]) -> str:
    """Return the settings that differ, such as ``lr 0.001 -> 0.002``."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {after.get(name)}" for name in names)


def _read_end(run: Run, record: Record) -> None:
    run.status, run.reason = str(record.get("ending")), str(record.get("reason", ""))
    kind = "failure" if run.status == "failed" else "end"
    run.events.append(Event(record["iteration"], kind, run.reason, unix_time(record)))


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
    read=_read_start,
)
END = RecordKind(
    name="end",
    fields={"ending": "finished, stopped or failed", "reason": "exit condition or error, one message"},
    file=TIMING_FILE,
    follows_steps=False,  # after an error of the device nothing can be read from it
    read=_read_end,
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
