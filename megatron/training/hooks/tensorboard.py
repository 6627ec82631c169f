"""TensorBoard with the tags of Megatron-LM. Each value is written once, even if a run rolls back and continues."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import UserError
from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.interval import IntervalSummary, Step
from megatron.training.hooks.scalars import Tags
from megatron.training.hooks.timing import Clock
from megatron.training.observe.metrics import EvalResult, MetricsFile, eval_record, read_metrics
from megatron.training.train_state import TrainState

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise UserError(
        f"--tensorboard-dir needs the tensorboard package ({error}): pip install tensorboard, or remove the flag"
    ) from error


class TensorBoardHook(Hook):
    """Writes points every ``point_interval`` iterations, but only at log points, without a device sync per step."""

    def __init__(
        self,
        writer_options: Mapping[str, object],
        tags: Tags,
        clock: Clock,
        *,
        point_interval: int = 1,
        history: Sequence[MetricsFile] = (),
    ):
        """``writer_options``: ``log_dir`` and ``max_queue`` of torch's SummaryWriter. ``history``: metrics and timing
        files of the run, already cut, from which a run that rolled back restores its points by samples."""
        self.writer_options = dict(writer_options)
        self.tags, self.clock, self.history = tags, clock, history
        self.point_interval = point_interval
        self.writer: SummaryWriter | None = None

    def on_train_start(self, run: RunInfo) -> None:
        """Open the writer. If the run rolled back (a history file was cut), tell TensorBoard to drop points from the
        next iteration on, and rewrite the earlier points by samples, which that would also drop."""
        if not any(file.num_cut for file in self.history):
            self.writer = SummaryWriter(**self.writer_options)
            return
        purge_step = run.state.iteration + 1
        self.writer = SummaryWriter(purge_step=purge_step, **self.writer_options)
        for file in self.history:
            self._restore_points_by_samples(file.path, purge_step)

    def on_steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if every(self.point_interval, step.iteration):
                self._add(step.record)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        self._add(self.clock.record(summary))

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        for result in results:
            self._add(eval_record(state.iteration, state.consumed_train_samples, result))
        self._flush()

    def on_save_timed(self, record: Mapping[str, Any]) -> None:
        self._add(record)

    def on_save(self, state: TrainState) -> None:
        self._flush()

    def on_train_end(self, state: TrainState) -> None:
        if self.writer is not None:
            self.writer.close()

    def _add(self, record: Mapping[str, Any], again: bool = False) -> None:
        """Add the points of a record; ``again``: only the points by samples."""
        if self.writer is not None:
            for tag, value in self.tags.of(record).items():
                if not again:
                    self.writer.add_scalar(tag, value, record["iteration"])
                self.writer.add_scalar(f"{tag} vs samples", value, record["consumed_samples"])

    def _flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def _restore_points_by_samples(self, path: Path, purge_step: int) -> None:
        """Rewrite points by samples: TensorBoard drops all points from ``purge_step`` on, in any unit."""
        for record in read_metrics(path) if path.exists() else ():
            shown = record["kind"] != "train" or every(self.point_interval, record["iteration"])
            if shown and record["consumed_samples"] >= purge_step:
                self._add(record, again=True)
