"""Records: a run reports one stream of records; each kind of record is one declaration.

A feature declares a :class:`RecordKind` and calls ``emit(kind, values)`` of its :class:`RunInfo`. Files, TensorBoard,
wandb, log lines, pages and comparisons render records by the declarations of their kinds and know no kind themselves.
The kinds of this package are the modules of ``kinds/``; other programs declare kinds with :func:`register`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron.training.config.logging import LoggingConfig
from megatron.training.observe.metrics import METRICS_FILE, Record
from megatron.training.observe.plan_comparison import Prediction
from megatron.training.train_state import TrainState

if TYPE_CHECKING:
    from megatron.training.observe.page.charts import Section
    from megatron.training.observe.run_folder import Run


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordKind:
    """One kind of record and how to show it. Compared by identity."""

    name: str
    """Value of the field ``kind``."""
    fields: Mapping[str, str]
    """Meaning and unit by field, without ``kind``, ``iteration``, ``consumed_samples`` and ``time`` (Unix seconds)."""
    file: str | None
    """File of the records, in the folder of the run; None: not stored. ``metrics.jsonl`` holds functions of settings
    and data only; records elsewhere have the field ``time``."""
    flush: Literal["later", "write", "fsync"] = "later"
    """When a record is on disk: with the records of the next log point, at once in the page cache, or on the device."""
    follows_steps: bool = True
    """Whether earlier iterations are reported first, which waits for the device."""
    tags: Callable[[Record, RunInfo], Mapping[str, float | str | None]] = lambda record, run: {}
    """Points of TensorBoard and wandb: tag -> number or text; None values are left out."""
    console: Callable[[Record, RunInfo], Iterable[str]] = lambda record, run: ()
    """Lines for the log."""
    read: Callable[[Run, Record], None] | None = None
    """Adds a record of a file to the description of a run; None: ``Run.add_numbers``."""
    page: Callable[[Run], Iterable[Section]] | None = None
    """Sections of the page of a run, whose charts are also in comparisons of runs; None: a chart per number in
    ``Run.numbers``."""

    def record(self, iteration: int, consumed_samples: int, values: Mapping[str, object]) -> Record:
        """Return the record of ``values``: JSON types by field."""
        record: Record = {"kind": self.name, "iteration": iteration, "consumed_samples": consumed_samples}
        if self.file != METRICS_FILE:
            record["time"] = time.time()
        record.update(values)
        return record


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Description of the run and this process for hooks and renderers."""

    state: TrainState
    """Live counters; at the start, the counters of the loaded checkpoint."""
    train_iters: int
    rank: int = 0
    world_size: int = 1
    data_parallel_rank: int = 0
    device: str = "cpu"
    """Device type of the training, "cpu" or "cuda"."""
    device_name: str = "CPU"
    """Value of ``torch.cuda.get_device_name()``, the key of the table of peaks."""
    trains: bool = True
    """False with --skip-train, which adds its evaluation to the records of the run."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that were given or differ from their defaults, as JSON types."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Versions, host and GPUs."""
    prediction: Prediction | None = None
    """Predicted step time; None on GPU kinds that the planner does not know, and on CPUs."""
    emit: Callable[..., None] = lambda kind, values, state=None: None
    """``emit(kind, values, state=None)`` reports a record to all hooks of this rank; ``values``: JSON types by field,
    ``state``: counters of the record, by default the current ones."""

    @property
    def is_log_rank(self) -> bool:
        """Whether this rank logs: the last one, because it holds the loss under pipeline parallelism."""
        return self.rank == self.world_size - 1


@functools.cache
def kinds() -> dict[str, RecordKind]:
    """Return all known kinds by name: the kinds of this package, then registered kinds."""
    names = sorted(path.stem for path in (Path(__file__).parent / "kinds").glob("*.py") if path.stem != "__init__")
    modules = [import_module(f"{__package__}.kinds.{name}") for name in names]
    return {kind.name: kind for module in modules for kind in module.KINDS}


def register(kind: RecordKind) -> RecordKind:
    """Declare a kind of another program, for files with its records; return it. Raises ValueError for a used name."""
    if kinds().setdefault(kind.name, kind) is not kind:
        raise ValueError(f"record kind {kind.name!r}: declared twice; use another name")
    return kind


def points(kind: RecordKind, record: Record, run: RunInfo) -> dict[str, float | str]:
    """Return the numbers and texts of a record by tag, without absent values."""
    tags = kind.tags(record, run).items()
    return {tag: value if isinstance(value, str) else float(value) for tag, value in tags if value is not None}
