"""Reader of a run's folder: series, evaluations, events, settings. Torch-free.

Each kind of record says how it is read; numbers of other kinds are series by field. Lines that cannot be read, values
of a wrong type and missing files give one problem line each, and no error. Per-layer statistics of long runs are read
at regular intervals only, because their lines are long."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron.core.config.errors import UserError, counted, printable
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import checkpoint_directory, read_json, read_tracker
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.safe_files import open_regular
from megatron.training.observe.metrics import METRICS_FILE, TIMING_FILE, Record, decode
from megatron.training.observe.records import kinds

STATISTICS_POINTS = 1000
"""Iterations whose per-layer statistics are read."""
COMMON_FOLDERS = re.compile(r"(?i)(checkpoint|ckpt|log|model|output|run|save|weight)s?|metrics|saved|tensorboard")
"""Names of folders that do not name a run."""
QUIET_SECONDS = 600.0
"""A run without a recorded end is running if its files changed within this time, or within ten log intervals."""
LOG_LINES = 200
HEAD = ("iteration", "consumed_samples", "time")
"""Numbers in every record."""
_STATISTICS = b', "statistics": {'  # the last key, as train_record writes it
_NOTABLE = re.compile(r"(?i)\b(error|warning|traceback|exception|failed|fault|killed)\b")


@dataclass
class Series:
    """Values by iteration."""

    x: list[int] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: int, y: float) -> None:
        self.x.append(x)
        self.y.append(y)

    def over(self, positions: Mapping[int, float]) -> Series:
        """Return the points whose iteration has a position (samples, tokens), over positions."""
        points = [(positions[x], y) for x, y in zip(self.x, self.y) if x in positions]
        return Series(*map(list, zip(*points))) if points else Series()


class Event(NamedTuple):
    """Row of the timeline."""

    iteration: int
    kind: str
    """start, restart, evaluation, save, skipped, NaN, rollback, end or failure."""
    text: str
    time: float | None = None
    """Unix seconds."""


@dataclass
class Run:
    """A run as its files describe it."""

    folder: Path
    label: str = ""
    """Name next to other runs."""
    status: str = ""
    """running, finished, stopped, failed or silent."""
    reason: str = ""
    train: dict[str, Series] = field(default_factory=dict)
    evaluation: dict[tuple[str, str], Series] = field(default_factory=dict)
    """By (loss, data set); "validation", "test" or ``SPLIT-NAME``."""
    scores: dict[tuple[str, str], Series] = field(default_factory=dict)
    """By (metric, task) of --eval-tasks."""
    numbers: dict[str, dict[str, Series]] = field(default_factory=dict)
    """Numbers by kind and field, or ``FIELD/NAME`` from tables; of ``timing`` and kinds without a reading function."""
    records: dict[str, list[Record]] = field(default_factory=dict)
    """Complete records by kind, of kinds that keep them."""
    consumed: dict[int, int] = field(default_factory=dict)
    """Samples by iteration."""
    statistics: dict[str, Series] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by use: iterations, evaluation, samples, checkpoint saving, repeated iterations."""
    first_start: float | None = None
    """Time of the first start, Unix seconds."""
    last_time: float | None = None
    """Time of the last record."""
    num_skipped: int = 0
    num_nan: int = 0
    tokens: float = 0.0
    samples: int = 0
    iteration: int = 0
    train_iters: int = 0
    world_size: int = 0
    device: str = ""
    start: Record = field(default_factory=dict)
    """Start record of the last process."""
    settings: dict[str, object] = field(default_factory=dict)
    """Settings that were given or differ from defaults."""
    all_settings: dict[str, object] = field(default_factory=dict)
    """All settings, of the last checkpoint."""
    versions: dict[str, object] = field(default_factory=dict)
    log_lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def timing(self) -> dict[str, Series]:
        """Measured values by field."""
        return self.numbers.setdefault("timing", {})

    @property
    def wall(self) -> float | None:
        """Seconds from the first start to the last record."""
        return None if self.first_start is None or self.last_time is None else self.last_time - self.first_start

    @property
    def name(self) -> str:
        """The last part of --save, else of the folder, that is not a common name such as ``checkpoints``."""
        save = self.settings.get("save", self.all_settings.get("save"))
        for path in (save, str(self.folder.resolve())):
            parts = Path(path).parts if isinstance(path, str) else ()
            names = [part for part in parts if part.strip("./") and not COMMON_FOLDERS.fullmatch(part)]
            if names:
                return names[-1]
        return "run"

    @property
    def model(self) -> str:
        """--model or the name of the folder of --load-hf, else the size of the model; '' if unknown."""
        settings = self.all_settings | self.settings
        for key in ("model", "load_hf"):
            if isinstance(name := settings.get(key), str) and name:
                return Path(name).name
        layers, width = (int(number(settings, key)) for key in ("num_layers", "hidden_size"))
        experts = int(number(settings, "num_experts"))
        if not (layers and width):
            return ""
        return f"{counted(layers, 'layer')} of {width}" + (f", {counted(experts, 'expert')}" if experts else "")

    def add_numbers(self, record: Record) -> None:
        """Add the numbers of a record to :attr:`numbers`."""
        series = self.numbers.setdefault(record["kind"], {})
        for key, value in flattened(record):
            if key not in HEAD:
                series.setdefault(key, Series()).add(record["iteration"], value)

    def spend(self, use: str, seconds: float) -> None:
        """Add seconds of a use of time."""
        self.seconds[use] = self.seconds.get(use, 0.0) + seconds


def flattened(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield name and value of each number of a record and its tables."""
    for key, value in record.items():
        if isinstance(value, dict) and not prefix:
            yield from flattened(value, f"{key}/")
        elif is_number(value):
            yield f"{prefix}{key}", value


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(record: Record, key: str, default: float = 0.0) -> float:
    """Return the number ``key`` of a record; ``default`` for another type, NaN and sizes that are impossible."""
    value = record.get(key)
    return float(value) if is_number(value) and abs(value) < 1e18 else default  # type: ignore[arg-type]


def unix_time(record: Record) -> float | None:
    """Return the time of a record; None if it is missing or impossible."""
    value = number(record, "time")
    return value if 0 < value < 2**36 else None


def table(record: Record, key: str) -> dict[str, object]:
    """Return the object ``key`` of a record; {} for another type."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def read_run(path: Path, now: float, log: Path | None = None) -> Run:
    """Read the run in ``path``, a folder or a metrics file. ``now``: Unix seconds, which decide whether a run without a
    recorded end is running. ``log``: file whose warnings and errors are listed. UserError without records."""
    folder, known = path if path.is_dir() else path.parent, kinds()
    metrics = folder / METRICS_FILE if path.is_dir() else path
    names = sorted({kind.file for kind in known.values() if kind.file} - {METRICS_FILE})
    files = [file for file in (metrics, *(folder / name for name in names)) if file.is_file()]
    if not files:
        raise UserError(f"{path}: no {METRICS_FILE} there; give the folder of --save or --tensorboard-dir")
    run = Run(folder)
    for file, content in (metrics, "losses"), (folder / TIMING_FILE, "rates, memory, times and settings of processes"):
        if file not in files:
            run.problems.append(f"{file.name}: missing: no {content}")
    for file in files:
        for record in records(file, run.problems, every_statistics=_stride(file)):
            kind = known.get(record["kind"])
            (Run.add_numbers if kind is None or kind.read is None else kind.read)(run, record)
            run.last_time = unix_time(record) or run.last_time
    if not run.train and not run.evaluation and not run.start:
        raise UserError(f"{metrics}: no record in it yet")
    _add_cuts(run)
    _add_checkpoint(run)
    if log is not None:
        _add_log(run, log)
    _find_status(run, now - max(file.stat().st_mtime for file in files))
    run.events.sort(key=lambda event: event.iteration)
    return run


def run_labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes of equal depth that distinguish the runs; the paths if two are equal."""
    parts = [(path.parent if path.suffix == ".jsonl" else path).resolve().parts for path in paths]
    depth = max(map(len, parts))
    for length in range(1, depth + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _stride(metrics: Path) -> int:
    """Estimated from the size of a line."""
    with open_regular(metrics) as lines:
        first = lines.readline(1 << 20)
    return 1 if _STATISTICS not in first else max(1, metrics.stat().st_size // len(first) // STATISTICS_POINTS)


def records(path: Path, problems: list[str], every_statistics: int = 1) -> Iterator[Record]:
    """Yield the readable records of a file; append a line with the number of the others to ``problems``. A torn last
    line, which a running process may still complete, does not count."""
    bad = 0
    try:
        with open_regular(path) as lines:
            for index, line in enumerate(lines):
                if index % every_statistics and line.endswith(b"\n"):
                    head, mark, _ = line.partition(_STATISTICS)
                    line = head + b"}\n" if mark else line
                record = decode(line)
                if record is not None and isinstance(record.get("kind"), str):
                    yield record
                elif line.endswith(b"\n"):
                    bad += 1
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
    if bad:
        problems.append(f"{path.name}: {counted(bad, 'unreadable line')} skipped")


def _add_cuts(run: Run) -> None:
    """Rollbacks: records that a resumed process moved to ``….cut-ITERATION``, their ends, and their lost time."""
    for path in sorted(run.folder.glob(f"{METRICS_FILE}.cut-*")):
        iteration = path.name.rpartition("-")[2]
        if not iteration.isdecimal():
            continue
        moved = records(path, [], every_statistics=1 << 30)
        lost = [record["iteration"] for record in moved if record["kind"] == "train"]
        if lost:
            text = f"{counted(len(lost), 'iteration')} up to {max(lost)} computed again"
            run.events.append(Event(int(iteration), "rollback", text))
    for path in sorted(run.folder.glob(f"{TIMING_FILE}.cut-*")):
        for record in records(path, []):
            if record["kind"] == "timing":
                seconds = number(record, "iterations") * number(record, "seconds_per_iteration")
                run.spend("repeated iterations", seconds)
            elif record["kind"] == "end" and record.get("ending") == "failed":
                text = str(record.get("reason", ""))
                run.events.append(Event(record["iteration"], "failure", text, unix_time(record)))


def _add_checkpoint(run: Run) -> None:
    try:
        which = read_tracker(run.folder)
        objects = read_json(Path(checkpoint_directory(run.folder, which)) / MANIFEST).get("objects")
    except FileNotFoundError:
        return
    except CheckpointError as error:
        run.problems.append(f"settings of the last checkpoint: {error}")
        return
    objects = objects if isinstance(objects, dict) else {}
    run.all_settings, environment = table(objects, "args"), table(objects, "environment")
    run.versions = run.versions or environment
    run.train_iters = run.train_iters or int(number(run.all_settings, "train_iters"))


def _add_log(run: Run, log: Path) -> None:
    try:
        with open_regular(log) as lines:
            for raw in lines:
                line = printable(raw.decode("utf-8", "replace").strip())
                if _NOTABLE.search(line) and "| consumed samples:" not in line:
                    run.log_lines.append(line[:500])
                    del run.log_lines[:-LOG_LINES]
    except OSError as error:
        run.problems.append(f"{log}: cannot be read ({error.strerror})")


def _find_status(run: Run, age: float) -> None:
    """``age``: seconds since the last write."""
    if run.status in ("finished", "stopped", "failed"):
        return
    pace = run.timing.get("seconds_per_iteration", Series()).y
    interval = run.settings.get("log_interval")
    steps = interval if is_number(interval) else 100
    limit = max(QUIET_SECONDS, 10 * pace[-1] * steps) if pace else QUIET_SECONDS  # type: ignore[operator]
    run.status = "running" if age < limit else "silent"
    run.reason = f"last change {age:.0f} s ago" + ("" if run.status == "running" else "; no end was recorded")
