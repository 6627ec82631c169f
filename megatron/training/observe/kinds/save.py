"""Records of checkpoints: before one is written, before a wait for one, and when it is complete."""

from __future__ import annotations

from megatron.training.observe.metrics import TIMING_FILE
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.observe.run_folder import Event, Run, number, unix_time


def _save_tags(record: Record, run: RunInfo) -> dict[str, float]:
    return {
        "save-checkpoint-time": record["seconds"],
        "save-checkpoint-stall-time": record["stall_seconds"],
        "save-checkpoint-gb-per-second": record["gb_per_second"],
    }


def _read_save(run: Run, record: Record) -> None:
    seconds, size = number(record, "seconds"), number(record, "bytes")
    run.events.append(Event(record["iteration"], "save", f"{seconds:.3g} s, {size / 1e9:.3g} GB", unix_time(record)))
    run.spend("checkpoint saving", number(record, "stall_seconds"))


SAVING = RecordKind(name="saving", fields={}, file=None, flush="fsync")
"""Just before a checkpoint of the iteration is written; the records of all its iterations are on disk."""
SAVE_WAIT = RecordKind(
    name="save_wait",
    fields={"saved_iteration": "iteration of the background save that training waits for"},
    file=None,
    follows_steps=False,
)
SAVE = RecordKind(
    name="save",
    fields={
        "background": "whether training continued during the save",
        "seconds": "from the start of the save until its tracker was written",
        "stall_seconds": "part of it during which training was blocked",
        "bytes": "tensor bytes of all ranks",
        "gb_per_second": "their rate",
    },
    file=TIMING_FILE,
    flush="write",
    follows_steps=False,
    tags=_save_tags,
    read=_read_save,
)
"""A complete checkpoint of the iteration; for a background save, reported iterations later."""
KINDS = (SAVING, SAVE_WAIT, SAVE)


def save_values(*, seconds: float, stall: float, num_bytes: int, background: bool) -> dict[str, float]:
    """Return the fields of a record of :data:`SAVE`; times in seconds."""
    return {
        "background": background,
        "seconds": seconds,
        "stall_seconds": stall,
        "bytes": num_bytes,
        "gb_per_second": num_bytes / 1e9 / max(seconds, 1e-9),
    }
