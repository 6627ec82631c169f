"""Measurements of an iteration and of an evaluation, and the append-only files that keep them.

``metrics.jsonl`` is the source of truth of a run: one record per iteration and per evaluated data set, holding only
values that are functions of the configuration and the data, so that training 2N steps writes the same bytes as N steps,
a resume, and N more. Wall-clock values go to ``timing.jsonl`` beside it. TensorBoard, wandb and the console are sinks.

Values stay tensors until the log interval: reading a loss every step would stall the device every step.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

if TYPE_CHECKING:
    from torch import Tensor

from megatron.core.config.errors import UserError

logger = logging.getLogger(__name__)

Scalar = Union[float, int, "Tensor"]
"""A number, or a 0-d tensor not read yet."""

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""JSON has no NaN: non-finite values are written as these strings."""

OF_ANOTHER_RANK = " (of another rank)"
"""Ends the name of a value that is checked here but was computed elsewhere."""

METRICS_FILE, TIMING_FILE = "metrics.jsonl", "timing.jsonl"


class NonFiniteError(UserError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


@dataclass(kw_only=True)
class StepMetrics:
    """One iteration. Losses are means per valid token over the global batch, equal on all ranks."""

    losses: dict[str, Any]
    """:data:`Scalar` by name."""
    num_tokens: Scalar
    """Valid tokens of the global batch (those the loss counts)."""
    learning_rate: float
    global_batch_size: int
    statistics: dict[str, Any] = field(default_factory=dict)
    """:data:`Scalar` by ``module/name``: what modules tell of themselves, such as the load of experts."""
    loss_scale: Scalar = 1.0
    grad_norm: Scalar | None = None
    num_zeros: Scalar | None = None
    """Zero gradient entries, with --log-num-zeros-in-grad."""
    params_norm: Scalar | None = None
    weight_decay: float | None = None
    skipped: bool = False
    """The weights were not updated (overflow, or --iterations-to-skip)."""
    invalid: Scalar = False
    """A loss or gradient was not finite and the run stops here: no sink shows this iteration."""
    nan: bool = False
    """A loss is NaN. Set by :func:`materialize` too, so that the step itself need not read the loss."""
    elapsed: float = 0.0
    """Host seconds from the end of the previous iteration to the end of this one, evaluation and saving excluded.
    On an accelerator only sums over a log interval mean something: the host runs ahead of the device."""


@dataclass(frozen=True)
class EvalResult:
    """Losses of one evaluated data set, means per valid token."""

    name: Literal["validation", "test"]
    dataset: str | None
    """Its name where several validation sets are evaluated apart."""
    losses: dict[str, float]
    final: bool = False
    """Evaluated after training rather than at --eval-interval."""


def is_tensor(value: Any) -> bool:
    """Whether ``value`` still has to be read from its device (told without importing torch)."""
    return hasattr(value, "device") and hasattr(value, "tolist")


def materialize(steps: Iterable[StepMetrics]) -> None:
    """Replace the tensors in ``steps`` by numbers: one copy to the host per device and dtype, whatever their count."""
    slots: dict[tuple, list[tuple[Any, str]]] = {}
    waiting: dict[tuple, list] = {}
    steps = list(steps)
    for step in steps:
        holders: tuple[dict[str, Any], ...] = (step.losses, step.statistics, step.__dict__)
        for holder in holders:
            for key, value in holder.items():
                if is_tensor(value):
                    group = (value.device, value.dtype)
                    slots.setdefault(group, []).append((holder, key))
                    waiting.setdefault(group, []).append(value.detach().reshape(()))
    for group, places in slots.items():
        import torch  # reading a finished run needs no torch

        for (holder, key), number in zip(places, torch.stack(waiting[group]).tolist()):
            holder[key] = number
    for step in steps:
        step.nan = bool(step.nan) or any(math.isnan(value) for value in step.losses.values())


def check_finite(
    values: Mapping[str, Scalar], *, iteration: int, rank: int, consumed_samples: int | None = None
) -> None:
    """Raise :class:`NonFiniteError` that names the rank, the iteration and the first value that is NaN or infinite.

    ``values`` are losses or gradients of any shape by name. Reads one flag per tensor from the device.
    """
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
            "trains on regardless"
        )
        error.elsewhere = name.endswith(OF_ANOTHER_RANK)
        raise error


def train_record(iteration: int, consumed_samples: int, metrics: StepMetrics) -> dict[str, Any]:
    """The ``metrics.jsonl`` record of one iteration; ``metrics`` must have been materialized."""
    record: dict[str, Any] = {"kind": "train", "iteration": iteration, "consumed_samples": consumed_samples}
    record.update(metrics.losses)
    optional = {
        "learning_rate": metrics.learning_rate,
        "weight_decay": metrics.weight_decay,
        "global_batch_size": metrics.global_batch_size,
        "num_tokens": metrics.num_tokens,
        "loss_scale": metrics.loss_scale,
        "grad_norm": metrics.grad_norm,
        "num_zeros": metrics.num_zeros,
        "params_norm": metrics.params_norm,
        "skipped": metrics.skipped,
        "nan": metrics.nan,
    }
    record.update({key: value for key, value in optional.items() if value is not None})
    if metrics.statistics:
        record["statistics"] = metrics.statistics
    return record


def eval_record(iteration: int, consumed_samples: int, result: EvalResult) -> dict[str, Any]:
    """The ``metrics.jsonl`` record of one evaluated data set."""
    record: dict[str, Any] = {
        "kind": "valid" if result.name == "validation" else "test",
        "iteration": iteration,
        "consumed_samples": consumed_samples,
    }
    if result.dataset is not None:
        record["dataset"] = result.dataset
    if result.final:
        record["final"] = True
    record.update({key: float(value) for key, value in result.losses.items()})
    return record


def save_record(
    iteration: int, consumed_samples: int, *, seconds: float, stall: float, num_bytes: int, background: bool
) -> dict[str, Any]:
    """The ``timing.jsonl`` record of one complete checkpoint: how long it took, and how long training stood still."""
    return {
        "kind": "save", "iteration": iteration, "consumed_samples": consumed_samples, "time": time.time(),
        "background": background, "seconds": seconds, "stall_seconds": stall, "bytes": num_bytes,
        "gb_per_second": num_bytes / 1e9 / max(seconds, 1e-9),
    }  # fmt: skip


def losses_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The losses in a record of either kind: whatever no other field is called."""
    others = {"kind", "iteration", "consumed_samples", "dataset", "final", *StepMetrics.__dataclass_fields__}
    return {key: value for key, value in record.items() if key not in others}


def encode(record: Mapping[str, Any]) -> bytes:
    """One line. Floats are written by repr, which reads back to the same bits; non-finite ones as strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(dict(record)), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of one whole line, or None for a torn or foreign one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        return None
    for holder in (record, record.get("statistics", {})):
        for key, value in holder.items():
            if key not in ("kind", "dataset") and isinstance(value, str) and value in NON_FINITE:
                holder[key] = NON_FINITE[value]
    return record


def read_metrics(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The records of a ``metrics.jsonl`` or ``timing.jsonl``, of a running run too; a torn line is left out."""
    with open(path, "rb") as lines:
        for line in lines:
            record = decode(line)
            if record is not None:
                yield record


def metrics_directory(save: str | None, tensorboard_dir: str | None) -> Path | None:
    """Where a run keeps its metrics files: --save, else --tensorboard-dir, else nowhere."""
    directory = save or tensorboard_dir
    return Path(directory) if directory else None


class MetricsFile:
    """An append-only file of JSON lines, written by one rank.

    Nothing here stops training: a disk that is full or cannot be written gives one warning, the file is cut back to its
    last whole record, and the records wait in memory (``MAX_WAITING`` of them) for the next flush.
    """

    MAX_WAITING = 100_000

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.waiting: list[bytes] = []
        self.num_cut = 0
        """Records that :meth:`resume` took out: above 0, the sinks hold points that training will repeat."""
        self._size: int | None = None
        self._warned = self._unsynced = False

    def resume(self, iteration: int) -> int:
        """Take out what training from ``iteration`` on will write again; returns the number of records taken out.

        These are the records of later iterations, final evaluations (they follow the last iteration of a run that now
        goes on) and a torn last line. They move to ``<name>.cut-<iteration>``, which only ever grows, so that a
        rollback loses nothing; the file itself is replaced atomically.
        """
        self.num_cut = 0
        try:
            if self.path.exists():
                self._cut(iteration)
        except OSError as error:
            self._warn(error)
        return self.num_cut

    def append(self, record: Mapping[str, Any]) -> None:
        """Queue one record of plain numbers; :meth:`flush` writes it."""
        if len(self.waiting) < self.MAX_WAITING:
            self.waiting.append(encode(record))

    def flush(self, durable: bool = False) -> None:
        """Write the queue, which then outlives this process; with ``durable`` also fsync, to outlive the machine.

        An fsync takes milliseconds in which a GPU waits: evaluations, checkpoints and the end have one, log points
        do not.
        """
        if not self.waiting and not (durable and self._unsynced):
            return
        try:
            self._write(b"".join(self.waiting), durable)
        except OSError as error:
            self._warn(error)
            return
        self.waiting.clear()
        if self._warned:
            logger.warning("%s can be written again", self.path)
            self._warned = False

    def _write(self, data: bytes, durable: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            size = file.tell() if self._size is None else self._size
            try:
                if file.tell() != size:
                    file.truncate(size)  # the torn rest of a write that failed
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
        def stays(line: bytes) -> bool:
            record = decode(line)
            return record is not None and record["iteration"] <= iteration and not record.get("final", False)

        with open(self.path, "rb") as lines:
            self.num_cut = sum(not stays(line) for line in lines)
        if not self.num_cut:
            return
        cut_path = self.path.with_name(f"{self.path.name}.cut-{iteration}")
        new_path = self.path.with_name(f"{self.path.name}.new")
        with open(self.path, "rb") as lines, open(new_path, "wb") as new, open(cut_path, "ab") as cut:
            for line in lines:
                if stays(line):
                    new.write(line)
                else:
                    cut.write(line if line.endswith(b"\n") else line + b"\n")
            for file in (cut, new):
                file.flush()
                os.fsync(file.fileno())
        from megatron.data.indexed_writer import sync_folder  # numpy's: reading a finished run needs none

        os.replace(new_path, self.path)
        sync_folder(self.path.parent)
        logger.info("moved %d records after iteration %d to %s", self.num_cut, iteration, cut_path)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            logger.warning("cannot write %s (%s): training goes on, its records wait in memory", self.path, error)
        self._warned = True
