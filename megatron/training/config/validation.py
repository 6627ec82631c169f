"""Evaluation during and after training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.cli import flag
from megatron.core.config.ranges import Batch, Iterations, NonNegativeInt, PositiveInt


@dataclass(kw_only=True)
class ValidationConfig:
    """Evaluation"""

    eval_iters: Iterations = 100
    """Batches per evaluation; 0 turns evaluation off."""

    eval_interval: PositiveInt | None = None
    """Iterations between evaluations; left out, only after training."""

    start_eval_at_iter: NonNegativeInt | None = None
    """No evaluation before this iteration."""

    eval_global_batch_size: Batch = flag()
    """Sequences per evaluation batch; default: --global-batch-size."""

    eval_micro_batch_size: Batch = flag()
    """Sequences per forward pass of evaluation; default: --micro-batch-size."""

    skip_train: bool = False
    """Evaluate only."""

    full_validation: bool = False
    """Evaluate on the whole validation set each time."""

    multiple_validation_sets: bool = False
    """Evaluate on each of several validation sets by itself. Needs --full-validation."""

    validation_set_names: list[str] | None = None
    """Names of those sets in the log, in the order of their paths."""
