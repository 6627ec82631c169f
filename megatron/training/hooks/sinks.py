"""Renderers of records: files, TensorBoard, wandb and the page.

tensorboard and wandb are imported only when their sink is created. All run on the rank that logs."""

from __future__ import annotations

import logging
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.training.config.logging import LoggingConfig
from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.train import TRAIN
from megatron.training.observe.metrics import MetricsFile, read_metrics
from megatron.training.observe.page.page import PAGE_FILE, write_page
from megatron.training.observe.records import Record, RecordKind, RunInfo, kinds, points

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)


class FileSink(Hook):
    """Appends each record to the file of its kind in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        names = {kind.file for kind in kinds().values() if kind.file is not None}
        self.files = {name: MetricsFile(directory / name) for name in sorted(names)}

    def on_start(self, run: RunInfo) -> None:
        """Remove the records that training will write again; with --skip-train keep them."""
        for file in self.files.values() if run.trains else ():
            file.resume(run.state.iteration)

    def on_record(self, kind: RecordKind, record: Record) -> None:
        if kind.file is not None:
            self.files.setdefault(kind.file, MetricsFile(self.directory / kind.file)).append(record)
        if kind.flush != "later":
            self.flush(durable=kind.flush == "fsync")

    def flush(self, durable: bool) -> None:
        for file in self.files.values():
            file.flush(durable)

    def on_end(self) -> None:
        self.flush(durable=True)


class TensorBoardSink(Hook):
    """TensorBoard points by iteration, and by samples under ``TAG vs samples``. No value is written twice."""

    def __init__(self, cfg: LoggingConfig, history: FileSink | None = None) -> None:
        """``history``: files of the run, already cut, from which a run that rolled back restores its points by samples.
        Raises UserError without the tensorboard package."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("--tensorboard-dir", "tensorboard", error) from error
        self.point_interval = cfg.tensorboard_log_interval
        self.history = [] if history is None else list(history.files.values())
        self.open = partial(SummaryWriter, cfg.tensorboard_dir, max_queue=cfg.tensorboard_queue_size)
        self.writer: SummaryWriter | None = None

    def on_start(self, run: RunInfo) -> None:
        """Open the writer. If the run rolled back (a history file was cut), tell TensorBoard to drop all points from
        the next iteration on, in any unit, and rewrite the earlier points by samples, which that also drops."""
        self.run = run
        rolled_back = any(file.num_cut for file in self.history)
        purge_step = run.state.iteration + 1
        self.writer = self.open(purge_step=purge_step if rolled_back else None)
        self.write_settings(run)
        for path in [file.path for file in self.history if rolled_back and file.path.exists()]:
            for record in read_metrics(path):
                kind = kinds().get(record["kind"])
                if kind is not None and record["iteration"] < purge_step <= record["consumed_samples"]:
                    self.write(kind, record, is_restored=True)

    def on_record(self, kind: RecordKind, record: Record) -> None:
        self.write(kind, record)
        if kind.flush == "fsync" and self.writer is not None:
            self.writer.flush()

    def write(self, kind: RecordKind, record: Record, is_restored: bool = False) -> None:
        """Add the points of a record; ``is_restored``: only the points by samples. Iterations outside of
        --tensorboard-log-interval have none."""
        if self.writer is None or (kind is TRAIN and not every(self.point_interval, record["iteration"])):
            return
        for tag, value in points(kind, record, self.run).items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            if not is_restored:
                add(tag, as_code(value) if isinstance(value, str) else value, record["iteration"])
            if isinstance(value, float):
                self.writer.add_scalar(f"{tag} vs samples", value, record["consumed_samples"])

    def write_settings(self, run: RunInfo) -> None:
        """Add the settings and versions of a run as texts, and the settings as its hyperparameters."""
        from torch.utils.tensorboard.summary import hparams

        assert self.writer is not None
        for tag, values in ("settings", run.settings), ("environment", run.environment):
            lines = ["| name | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())]
            self.writer.add_text(tag, "\n".join(lines), run.state.iteration)
        settings = run.settings.items()
        numbers = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in settings}
        for summary in hparams(numbers, {}):
            self.writer._get_file_writer().add_summary(summary)

    def on_end(self) -> None:
        if self.writer is not None:
            self.writer.close()


def as_code(text: str) -> str:
    """Return ``text`` as a Markdown code block, which shows its markup as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class WandbSink(Hook):
    """One Weights & Biases row per iteration. Steps never decrease, because wandb would drop such rows. Offline with
    ``WANDB_MODE=offline``; to continue a run, set wandb's ``WANDB_RUN_ID`` and ``WANDB_RESUME``."""

    def __init__(self, cfg: LoggingConfig, init_options: dict[str, Any]) -> None:
        """``init_options``: arguments of ``wandb.init``. Raises UserError without the wandb package."""
        try:
            import wandb
        except ImportError as error:
            raise missing_package("--wandb-project", "wandb", error) from error
        self.point_interval, self.folder = cfg.tensorboard_log_interval, Path(init_options["dir"])
        self.open, self.as_html = partial(wandb.init, **init_options), wandb.Html
        self.wandb_run: wandb.Run | None = None
        self.latest = 0
        """Latest iteration of a record."""

    def on_start(self, run: RunInfo) -> None:
        """Create the folder of ``init_options`` and call ``wandb.init``, which resumes a run only by WANDB_RUN_ID and
        WANDB_RESUME. Log a warning if the run is past this iteration: wandb then drops new rows up to there."""
        self.run = run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.wandb_run = self.open()
        if self.wandb_run.step > run.state.iteration:
            logger.warning(
                "the wandb run that is continued is at step %d, training at iteration %d: wandb keeps its old rows up "
                "to there",
                self.wandb_run.step,
                run.state.iteration,
            )

    def on_record(self, kind: RecordKind, record: Record) -> None:
        """Add the values of a record to the row of its iteration. The record of a background save, which comes
        after records of later iterations, goes to the latest row."""
        iteration = record["iteration"]
        if self.wandb_run is None or (kind is TRAIN and not every(self.point_interval, iteration)):
            return
        row: Record = {
            tag: self.as_html(f"<pre>{escape(value)}</pre>") if isinstance(value, str) else value
            for tag, value in points(kind, record, self.run).items()
        }
        if row:
            if kind is TRAIN:
                row["samples vs steps"] = record["consumed_samples"]
            self.wandb_run.log(row, step=max(iteration, self.wandb_run.step) if iteration < self.latest else iteration)
        self.latest = max(self.latest, iteration)

    def on_end(self) -> None:
        if self.wandb_run is not None:
            self.wandb_run.finish()


class PageHook(Hook):
    """Writes ``report.html`` to the folder of the files, also after an error. Use after :class:`FileSink`."""

    kinds = ()

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_end(self) -> None:
        if self.directory.is_dir():
            write_page(self.directory, self.directory / PAGE_FILE)


def missing_package(flag: str, package: str, error: ImportError) -> UserError:
    """Return the error for a ``flag`` whose optional ``package`` cannot be imported."""
    return UserError(f"{flag} needs the {package} package ({error}): pip install {package}, or remove the flag")
