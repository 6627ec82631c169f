"""Sinks of a run's records: ``metrics.jsonl``, ``timing.jsonl``, TensorBoard and wandb.

:class:`Sink` turns the events of the loop into records; :func:`scalars` turns a record into values by tag, on which
dashboards of Megatron-LM runs depend. tensorboard and wandb are imported only when their sink is created.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.core.timers import Timers
from megatron.training.config.logging import LoggingConfig
from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.console import perplexity
from megatron.training.hooks.interval import IntervalSummary, Step
from megatron.training.observe.metrics import (
    EvalResult,
    MetricsFile,
    Record,
    Sample,
    eval_record,
    read_metrics,
    record_losses,
    sample_record,
)
from megatron.training.observe.run_records import Ending, duration_record, end_record, start_record
from megatron.training.observe.step_parts import mean_parts
from megatron.training.observe.throughput import Throughput, memory_bytes
from megatron.training.train_state import TrainState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

TAGS = {
    "train": {
        "learning-rate": "learning_rate",
        "batch-size": "global_batch_size",
        "loss-scale": "loss_scale",
        "grad-norm": "grad_norm",
        "num-zeros": "num_zeros",
        "params-norm": "params_norm",
        "weight-decay": "weight_decay",
    },
    "timing": {
        "iteration-time": "seconds_per_iteration",
        "tokens-per-second": "tokens_per_second",
        "throughput": "tflops_per_device",
        "mfu": "mfu",
    },
    "save": {
        "save-checkpoint-time": "seconds",
        "save-checkpoint-stall-time": "stall_seconds",
        "save-checkpoint-gb-per-second": "gb_per_second",
    },
    "evaluation": {"evaluation-time": "seconds"},
    "generation": {"generation-time": "seconds"},
}
"""Fields of records by kind and tag. Times are in seconds, ``throughput`` in TFLOP/s per device."""


def scalars(record: Record, cfg: LoggingConfig, world_size: int) -> dict[str, float]:
    """Return tag -> value for a record of ``metrics.jsonl`` or ``timing.jsonl``, without absent values and tags that
    ``cfg`` does not request. Besides `TAGS`: losses and module statistics by name, world-size, the values of
    `memory_bytes` and NAME-time (s) per timer."""
    kind = record["kind"]
    values: Record = {tag: record.get(field) for tag, field in TAGS.get(kind, {}).items()}
    if kind == "train":
        if not cfg.log_loss_scale_to_tensorboard:
            del values["loss-scale"]
        if cfg.log_world_size_to_tensorboard:
            values["world-size"] = world_size
        values |= record_losses(record) | record.get("statistics", {})
    elif kind == "timing":
        if not cfg.log_throughput:
            values = {"iteration-time": values["iteration-time"]}
        if cfg.log_memory_to_tensorboard:
            values |= record["memory"]
        if cfg.log_timers_to_tensorboard:
            values |= {f"{name}-time": ms / 1000.0 for name, ms in record.get("timers_ms", {}).items()}
    elif kind == "task":
        values = {f"{record['dataset']} {name}": value for name, value in record_losses(record).items()}
    elif kind in ("valid", "test"):
        values = _evaluation_scalars(record, cfg.log_validation_ppl_to_tensorboard)
    return {tag: float(value) for tag, value in values.items() if value is not None}


def _evaluation_scalars(record: Record, with_perplexity: bool) -> dict[str, float]:
    """``LOSS validation`` or ``LOSS test``, with ``-DATASET`` for named sets; separate tags keep test results from
    overwriting validation points."""
    place = "validation" if record["kind"] == "valid" else "test"
    suffix = f"-{record['dataset']}" if "dataset" in record else ""
    values = {f"{name} {place}{suffix}": value for name, value in record_losses(record).items()}
    return values | ({f"{tag} ppl": perplexity(value) for tag, value in values.items()} if with_perplexity else {})


@dataclass(frozen=True)
class Clock:
    """Source of wall-clock values."""

    throughput: Throughput
    timers: Timers
    device: str = "cpu"

    def record(self, summary: IntervalSummary) -> Record:
        """Return the ``timing.jsonl`` record of one log interval: counters, seconds per iteration, tokens per second,
        TFLOP/s per device and MFU (None if unknown), `memory_bytes` now, and, if timers ran, their latest milliseconds
        (maximum over ranks), and the parts of an iteration (`mean_parts`). Reads the wall clock; writes nothing."""
        rate = self.throughput.rate(summary.flops, summary.num_tokens, summary.elapsed)
        timers = {"timers_ms": self.timers.latest} if self.timers.latest else {}
        parts = mean_parts([step.metrics.step_marks for step in summary.steps])
        return {
            "kind": "timing",
            "iteration": summary.iteration,
            "consumed_samples": summary.consumed_samples,
            "time": time.time(),
            "iterations": len(summary.steps),
            "seconds_per_iteration": summary.elapsed_per_iteration,
            "tokens_per_second": rate.tokens_per_second,
            "tflops_per_device": rate.tflops,
            "mfu": rate.mfu,
            "world_size": self.throughput.world_size,
            "device": self.throughput.device_name,
            "memory": memory_bytes(self.device),
            **({"parts_seconds": parts} if parts else {}),
            **timers,
        }


class Sink(Hook):
    """Calls :meth:`write` with each record of the run, in the order of events: train records of every
    ``point_interval`` iterations, valid and test records, a timing record per log point, a save record per checkpoint,
    an evaluation record per evaluation, and records of the start and end of this process. Use after ``TimersHook``,
    which gathers the times of the timing record."""

    def __init__(self, clock: Clock, point_interval: int = 1) -> None:
        self.clock, self.point_interval = clock, point_interval

    def write(self, record: Record) -> None:
        """Store one record; may buffer it."""
        raise NotImplementedError

    def flush(self) -> None:
        """Store buffered records, after evaluations and before checkpoints."""

    def on_train_start(self, run: RunInfo) -> None:
        self.write(
            start_record(
                run.state.iteration,
                run.state.consumed_train_samples,
                train_iters=run.train_iters,
                world_size=run.world_size,
                settings=run.settings,
                environment=run.environment,
                prediction=run.prediction,
            )
        )

    def on_steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if every(self.point_interval, step.iteration):
                self.write(step.record)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        self.write(self.clock.record(summary))

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        for result in results:
            self.write(eval_record(state.iteration, state.consumed_train_samples, result))
        if any(result.seconds for result in results):  # not for results that are reported again
            self.write(duration_record("evaluation", state.iteration, state.consumed_train_samples, results))
        self.flush()

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self.write(sample_record(state.iteration, state.consumed_train_samples, sample))
        self.write(duration_record("generation", state.iteration, state.consumed_train_samples, samples))
        self.flush()

    def on_save(self, state: TrainState) -> None:
        self.flush()

    def on_save_timed(self, record: Record) -> None:
        self.write(record)

    def on_stop(self, state: TrainState, ending: Ending, reason: str) -> None:
        self.write(end_record(state.iteration, state.consumed_train_samples, ending, reason))

    def on_train_end(self, state: TrainState) -> None:
        self.flush()


class FileSink(Sink):
    """Appends the records of ``kinds`` to ``file``: to the system at log points and saves, with fsync in `flush`."""

    def __init__(self, file: MetricsFile, kinds: Collection[str], clock: Clock, trains: bool = True) -> None:
        """``trains``: False with --skip-train, which appends its evaluation and removes no records."""
        super().__init__(clock)
        self.file, self.kinds, self.trains = file, kinds, trains

    def on_train_start(self, run: RunInfo) -> None:
        if self.trains:
            self.file.resume(run.state.iteration)
            super().on_train_start(run)
            self.file.flush()

    def write(self, record: Record) -> None:
        if record["kind"] in self.kinds:
            self.file.append(record)

    def flush(self) -> None:
        self.file.flush(durable=True)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        if "timing" in self.kinds:
            super().on_log(state, summary)
        self.file.flush()

    def on_save_timed(self, record: Record) -> None:
        super().on_save_timed(record)
        self.file.flush()


class TensorBoardSink(Sink):
    """TensorBoard points by iteration, and by samples under ``TAG vs samples``. Each value is written once, even if a
    run rolls back and continues."""

    def __init__(self, cfg: LoggingConfig, clock: Clock, history: Sequence[MetricsFile] = ()) -> None:
        """``history``: metrics and timing files of the run, already cut, from which a run that rolled back restores its
        points by samples. Raises UserError without the tensorboard package."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("--tensorboard-dir", "tensorboard", error) from error
        super().__init__(clock, cfg.tensorboard_log_interval)
        self.cfg, self.history = cfg, history
        self.open = partial(SummaryWriter, cfg.tensorboard_dir, max_queue=cfg.tensorboard_queue_size)
        self.writer: SummaryWriter | None = None

    def on_train_start(self, run: RunInfo) -> None:
        """Open the writer. If the run rolled back (a history file was cut), tell TensorBoard to drop all points from
        the next iteration on, in any unit, and rewrite the earlier points by samples, which that also drops."""
        rolled_back = any(file.num_cut for file in self.history)
        purge_step = run.state.iteration + 1
        self.writer = self.open(purge_step=purge_step if rolled_back else None)
        super().on_train_start(run)
        for path in [file.path for file in self.history if rolled_back and file.path.exists()]:
            for record in read_metrics(path):
                is_point = record["kind"] != "train" or every(self.point_interval, record["iteration"])
                if is_point and record["iteration"] < purge_step <= record["consumed_samples"]:
                    self.write(record, is_restored=True)

    def write(self, record: Record, is_restored: bool = False) -> None:
        """Add the points of a record; ``again``: only the points by samples."""
        if self.writer is not None and record["kind"] == "start":
            self.write_settings(record)
        elif self.writer is not None and record["kind"] == "sample":
            if not is_restored:
                self.writer.add_text(f"sample {record['number']}", as_code(record), record["iteration"])
        elif self.writer is not None:
            for tag, value in scalars(record, self.cfg, self.clock.throughput.world_size).items():
                if not is_restored:
                    self.writer.add_scalar(tag, value, record["iteration"])
                self.writer.add_scalar(f"{tag} vs samples", value, record["consumed_samples"])

    def write_settings(self, record: Record) -> None:
        """Add the settings and versions of a start record as texts, and the settings as hyperparameters of this
        run."""
        from torch.utils.tensorboard.summary import hparams

        assert self.writer is not None
        for tag, values in ("settings", record["settings"]), ("environment", record["environment"]):
            lines = ["| name | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())]
            self.writer.add_text(tag, "\n".join(lines), record["iteration"])
        settings = record["settings"].items()
        numbers = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in settings}
        for summary in hparams(numbers, {}):
            self.writer._get_file_writer().add_summary(summary)

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def on_train_end(self, state: TrainState) -> None:
        if self.writer is not None:
            self.writer.close()


def as_code(record: Record) -> str:
    """Return prompt and text of a sample as a Markdown code block, which shows markup of the text as it is."""
    return "\n".join(f"    {line}" for line in (record["prompt"] + record["text"]).splitlines())


class WandbSink(Sink):
    """One Weights & Biases row per iteration. Steps never decrease, because wandb would drop such rows. Offline with
    ``WANDB_MODE=offline``; to continue a run, set wandb's ``WANDB_RUN_ID`` and ``WANDB_RESUME``."""

    def __init__(self, cfg: LoggingConfig, clock: Clock, init_options: dict[str, Any]) -> None:
        """``init_options``: arguments of ``wandb.init``. Raises UserError without the wandb package."""
        try:
            import wandb
        except ImportError as error:
            raise missing_package("--wandb-project", "wandb", error) from error
        super().__init__(clock, cfg.tensorboard_log_interval)
        self.cfg, self.folder = cfg, Path(init_options["dir"])
        self.open, self.as_html = partial(wandb.init, **init_options), wandb.Html
        self.run: wandb.Run | None = None

    def on_train_start(self, run: RunInfo) -> None:
        """Create the folder ``dir`` of ``init_options`` and pass them to ``wandb.init``, which resumes a run only by
        WANDB_RUN_ID and WANDB_RESUME. Log a warning if the run is already past this iteration: wandb then keeps its old
        rows and drops new ones up to there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = self.open()
        if self.run.step > run.state.iteration:
            logger.warning(
                "the wandb run that is continued is at step %d, training at iteration %d: wandb keeps its old rows up "
                "to there",
                self.run.step,
                run.state.iteration,
            )

    def write(self, record: Record) -> None:
        """Add the values of a record to the row of its iteration. The save record of a background save goes to the
        latest row, because it appears after later iterations."""
        row: Record = dict(scalars(record, self.cfg, self.clock.throughput.world_size))
        if record["kind"] == "sample":
            row = {
                f"sample {record['number']}": self.as_html(f"<pre>{escape(record['prompt'] + record['text'])}</pre>")
            }
        if self.run is not None and row:
            if record["kind"] == "train":
                row["samples vs steps"] = record["consumed_samples"]
            is_late = record["kind"] == "save"
            self.run.log(row, step=max(record["iteration"], self.run.step) if is_late else record["iteration"])

    def on_train_end(self, state: TrainState) -> None:
        if self.run is not None:
            self.run.finish()


def missing_package(flag: str, package: str, error: ImportError) -> UserError:
    """Return the error for a ``flag`` whose optional ``package`` cannot be imported."""
    return UserError(f"{flag} needs the {package} package ({error}): pip install {package}, or remove the flag")
