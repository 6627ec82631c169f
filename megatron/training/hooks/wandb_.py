"""Weights & Biases sink: one row per iteration. Steps never decrease, because wandb would drop such rows.

Offline with ``WANDB_MODE=offline``; to continue a run, set wandb's ``WANDB_RUN_ID`` and ``WANDB_RESUME``.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import UserError
from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.interval import IntervalSummary, Step
from megatron.training.hooks.scalars import Tags
from megatron.training.hooks.timing import Clock
from megatron.training.observe.metrics import EvalResult, eval_record
from megatron.training.train_state import TrainState

try:
    import wandb
except ImportError as error:
    raise UserError(
        f"--wandb-project needs the wandb package ({error}): pip install wandb, or remove the flag"
    ) from error

logger = logging.getLogger(__name__)


class WandbHook(Hook):
    """Writes rows every ``point_interval`` iterations, at log points only; evaluations at their iteration."""

    def __init__(self, init_options: dict[str, Any], tags: Tags, clock: Clock, *, point_interval: int = 1):
        """``init_options``: arguments of ``wandb.init`` (project, name, entity, dir, config)."""
        self.init_options, self.tags, self.clock = init_options, tags, clock
        self.point_interval = point_interval
        self.run: Any = None

    def on_train_start(self, run: RunInfo) -> None:
        """Create wandb's folder and start or resume the run with ``wandb.init``. Log a warning if the resumed run is
        already past this iteration, because wandb then keeps its old rows and drops new ones up to there."""
        Path(self.init_options["dir"]).mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(**self.init_options)
        if self.run.step > run.state.iteration:
            logger.warning(
                "the wandb run that is continued is at step %d, training at iteration %d: wandb keeps its old rows up "
                "to there",
                self.run.step,
                run.state.iteration,
            )

    def on_steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if every(self.point_interval, step.iteration):
                row = {**self.tags.of(step.record), "samples vs steps": step.consumed_samples}
                self.run.log(row, step=step.iteration)

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        self.run.log(self.tags.of(self.clock.record(summary)), step=summary.iteration)

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        for result in results:
            record = eval_record(state.iteration, state.consumed_train_samples, result)
            self.run.log(self.tags.of(record), step=state.iteration)

    def on_save_timed(self, record: Mapping[str, Any]) -> None:
        self.run.log(self.tags.of(record), step=max(record["iteration"], self.run.step))  # wandb drops earlier steps

    def on_train_end(self, state: TrainState) -> None:
        if self.run is not None:
            self.run.finish()
