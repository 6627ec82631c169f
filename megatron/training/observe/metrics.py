"""Measurements per iteration and per evaluation, and the append-only files that store them.

``metrics.jsonl`` is the source of truth of a run: one record per iteration and per evaluated data set, holding only
values that are functions of configuration and data. Training 2N steps therefore writes the same bytes as N steps, a
resume, and N more. Wall-clock values go to ``timing.jsonl`` next to it.

Values stay tensors until the log interval, because reading a loss would sync with the device in every step."""

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, Union

if TYPE_CHECKING:
    from torch import Tensor

from megatron.core.config.errors import EXIT_FAILED, UserError
from megatron.core.safe_files import create_file, fsync_path, open_regular, open_to_append, parse_json
from megatron.training.observe.step_parts import StepMarks

logger = logging.getLogger(__name__)

Scalar = Union[float, int, "Tensor"]
"""Number, or a 0-d tensor that has not been read yet."""

Record = dict[str, Any]
"""JSON object: one line of ``metrics.jsonl`` or ``timing.jsonl``."""

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Strings for non-finite values, because JSON has no NaN."""

TEXTS = ("kind", "dataset", "prompt", "text")
"""Fields that hold text, in which "nan" is a word."""

OF_ANOTHER_RANK = " (of another rank)"
"""Suffix of the name of a value that is checked here but was computed on another rank."""

METRICS_FILE, TIMING_FILE = "metrics.jsonl", "timing.jsonl"


class NonFiniteError(UserError, ArithmeticError):
    """A loss or gradient is NaN or infinite."""

    exit_code = EXIT_FAILED


class PlanFigures(NamedTuple):
    """Figures of the plan of a global batch with samples of different lengths."""

    imbalance: float
    """Modeled time of the slowest rank over the mean, minus 1."""
    tokens: int
    """Tokens of all samples, without padding."""
    cp_sizes: Mapping[str, int]
    """Number of micro-batches by context-parallel size."""
    flops: float | None
    """Model FLOPs of the batch."""


@dataclass(kw_only=True)
class StepMetrics:
    """Measurements of one iteration. Losses are means per valid token over the global batch, equal on all ranks.
    Fields are in the order of the keys in ``metrics.jsonl``."""

    losses: Mapping[str, Scalar]
    """Losses by name."""
    learning_rate: float
    weight_decay: float | None = None
    global_batch_size: int
    num_tokens: Scalar
    """Valid tokens of the global batch, which contribute to the loss."""
    statistics: Mapping[str, Scalar] = field(default_factory=dict)
    """Statistics of modules, such as expert load, by ``module/name``."""
    plan: PlanFigures | None = None
    """Set with --use-varlen-dataset."""
    loss_scale: Scalar = 1.0
    grad_norm: Scalar | None = None
    num_zeros: Scalar | None = None
    """Zero gradient entries, with --log-num-zeros-in-grad."""
    params_norm: Scalar | None = None
    skipped: bool = False
    """Whether the weights were not updated (overflow, or --iterations-to-skip)."""
    invalid: Scalar = False
    """Whether a loss or gradient was not finite and the run stops; no sink shows this iteration."""
    nan: bool = False
    """Whether a loss is NaN. Also set by :func:`materialize`, so that the step need not read the loss."""
    elapsed: float = 0.0
    """Host seconds from the end of the previous iteration to the end of this one, without evaluation and saving. On an
    accelerator only sums over a log interval are meaningful, because the host runs ahead of the device."""
    step_marks: StepMarks | None = None
    """Times of the parts of this iteration."""


def is_tensor(value: object) -> TypeGuard["Tensor"]:
    """Whether ``value`` must still be read from its device (decided without importing torch)."""
    return hasattr(value, "device") and hasattr(value, "tolist")


def materialize(steps: Iterable[StepMetrics]) -> None:
    """Replace the tensors in ``steps`` by numbers, and set ``nan``. Changes the given objects, not their dicts.
    Waits for the device: one copy to the host per device and dtype, for any number of tensors."""
    steps = list(steps)
    tensors: dict[tuple[object, object], dict[int, Tensor]] = {}
    for step in steps:
        for value in (*step.losses.values(), *step.statistics.values(), *vars(step).values()):
            if is_tensor(value):
                tensors.setdefault((value.device, value.dtype), {})[id(value)] = value.detach().reshape(())
    numbers: dict[int, float] = {}  # by id, which is unique: the steps keep their tensors until they are replaced
    for group in tensors.values():
        import torch  # imported late: reading metrics needs no torch

        numbers.update(zip(group, torch.stack(list(group.values())).tolist()))

    def read(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {name: numbers.get(id(value), value) for name, value in values.items()}

    for step in steps:
        step.losses, step.statistics = read(step.losses), read(step.statistics)
        vars(step).update(read(vars(step)))
        step.nan = bool(step.nan) or any(math.isnan(value) for value in step.losses.values())


def check_finite(
    values: Mapping[str, Scalar], *, iteration: int, rank: int, consumed_samples: int | None = None
) -> None:
    """Raise :class:`NonFiniteError` for the first of ``values`` by name that is NaN or infinite; sets ``elsewhere`` if
    the name ends with `OF_ANOTHER_RANK`. Waits for the device once per tensor."""
    for name, value in values.items():
        if isinstance(value, (int, float)):
            if math.isfinite(value):
                continue
            where, bad = "", float(value)
        else:
            flat = value.detach().reshape(-1)
            finite = flat.isfinite()
            if bool(finite.all()):
                continue
            index = int((~finite).to(dtype=finite.long().dtype).argmax())
            where, bad = (f"[{index} of {flat.numel()}]" if flat.numel() > 1 else ""), float(flat[index])
        samples = "" if consumed_samples is None else f" (samples from {consumed_samples} on)"
        error = NonFiniteError(
            f"rank {rank}, iteration {iteration}{samples}: {name}{where} is {bad}. The weights have not been updated. "
            "Look at the data of that batch, lower --lr or raise the warm-up; --no-check-for-nan-in-loss-and-grad "
            "ignores it and continues"
        )
        error.elsewhere = name.endswith(OF_ANOTHER_RANK)
        raise error


def record_losses(record: Record) -> dict[str, float]:
    """Return the losses in a train or evaluation record: all keys that are not other fields."""
    measurements = {"kind", "iteration", "consumed_samples", "dataset", "final", *StepMetrics.__dataclass_fields__}
    return {key: value for key, value in record.items() if key not in measurements}


def encode(record: Record) -> bytes:
    """Return a record as one JSON line in UTF-8 with a newline. Floats use repr, which restores the same bits;
    non-finite ones become strings. Values must be plain: tensors raise TypeError."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(dict(record)), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> Record | None:
    """Return the record of one line, with strings such as "nan" as floats again, except in fields of `TEXTS`; None for
    a torn or invalid line."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        return None
    if not isinstance(statistics := record.get("statistics", {}), dict):
        return None
    for holder in (record, statistics):
        for key, value in holder.items():
            if key not in TEXTS and isinstance(value, str) and value in NON_FINITE:
                holder[key] = NON_FINITE[value]
    return record


def read_metrics(path: str | os.PathLike) -> Iterator[Record]:
    """Yield the records of a ``metrics.jsonl`` or ``timing.jsonl``, possibly of a running job; skip torn lines."""
    with open_regular(path) as lines:
        for line in lines:
            record = decode(line)
            if record is not None:
                yield record


class MetricsFile:
    """Append-only file of JSON lines, written by one rank. Its errors never stop training: if the disk is full or not
    writable, warn once, truncate the file to its last complete record, and buffer the records in memory (at most
    ``MAX_WAITING``) until the next flush."""

    MAX_WAITING = 100_000

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.waiting: list[bytes] = []
        self.num_cut = 0
        """Records that :meth:`resume` must remove; if above 0, sinks hold points that training will repeat."""
        self._size: int | None = None
        self._num_lost, self._warned, self._unsynced = 0, False, False

    def resume(self, iteration: int) -> int:
        """Remove records that training after ``iteration`` will write again, final evaluations (written after the last
        iteration of a run that now continues) and torn lines; return their number. They move to the append-only
        ``<name>.cut-<iteration>``, so that a rollback loses nothing. An OSError gives one warning; the records stay."""
        self.num_cut = 0
        try:
            if self.path.exists():
                self._cut(iteration)
        except OSError as error:
            self._warn(error)
        return self.num_cut

    def append(self, record: Record) -> None:
        """Queue one record of plain numbers; :meth:`flush` writes it. Drops the record if ``MAX_WAITING`` records are
        queued; the next flush that succeeds logs the number of dropped records."""
        if len(self.waiting) < self.MAX_WAITING:
            self.waiting.append(encode(record))
        else:
            self._num_lost += 1

    def flush(self, durable: bool = False) -> None:
        """Write the queue, so that it survives this process; with ``durable`` also fsync, so that it survives the
        machine. Never raises: on an OSError, warn once and keep the queue. An fsync blocks training for milliseconds:
        use it for evaluations, checkpoints and the end only."""
        if not self.waiting and not (durable and self._unsynced):
            return
        try:
            self._write(b"".join(self.waiting), durable)
        except OSError as error:
            self._warn(error)
            return
        self.waiting.clear()
        if self._warned or self._num_lost:
            lost = f"; the last {self._num_lost} records did not fit in memory" if self._num_lost else ""
            logger.warning("%s can be written again%s", self.path, lost)
            self._num_lost, self._warned = 0, False

    def _write(self, data: bytes, durable: bool) -> None:
        """Append, and with ``durable`` fsync, after truncating the remainder of a failed write. On an OSError, truncate
        to the size before and raise it. Does not change the queue."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(self.path, buffering=0) as file:
            size = file.tell() if self._size is None else self._size
            try:
                if file.tell() != size:
                    file.truncate(size)  # remove the remainder of a failed write
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
                if durable:
                    os.fsync(file.fileno())
            except OSError:
                self._size = size
                file.truncate(size)
                raise
        self._size, self._unsynced = size + len(data), not durable

    def _cut(self, iteration: int) -> None:
        """Move the records that :meth:`resume` removes to the ``.cut`` file, then replace the file atomically; fsync
        both. Sets ``num_cut``. Raises OSError."""

        def stays(line: bytes) -> bool:
            record = decode(line)
            return record is not None and record["iteration"] <= iteration and not record.get("final", False)

        with open_regular(self.path) as lines:
            self.num_cut = sum(not stays(line) for line in lines)
        if not self.num_cut:
            return
        cut_path = self.path.with_name(f"{self.path.name}.cut-{iteration}")
        new_path = self.path.with_name(f"{self.path.name}.new")
        with open_regular(self.path) as lines, create_file(new_path) as new, open_to_append(cut_path) as cut:
            for line in lines:
                if stays(line):
                    new.write(line)
                else:
                    cut.write(line if line.endswith(b"\n") else line + b"\n")
            for file in (cut, new):
                file.flush()
                os.fsync(file.fileno())
        os.replace(new_path, self.path)
        fsync_path(self.path.parent)
        logger.info("moved %d records after iteration %d to %s", self.num_cut, iteration, cut_path)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            logger.warning("cannot write %s (%s): training continues, the records are kept in memory", self.path, error)
        self._warned = True
