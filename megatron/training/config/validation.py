"""Evaluation during and after training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Batch, Dim, Iterations, NonNegativeInt, PositiveInt, Range


@dataclass(kw_only=True)
class ValidationConfig(FlagGroup):
    """Evaluation"""

    eval_iters: Iterations = 100
    """Batches per evaluation; 0: no evaluation."""

    eval_interval: PositiveInt | None = None
    """Iterations between evaluations; default: only after training."""

    start_eval_at_iter: NonNegativeInt | None = None
    """First iteration with an evaluation."""

    eval_global_batch_size: Batch = flag()
    """Sequences per evaluation batch; default: --global-batch-size."""

    eval_micro_batch_size: Batch = flag()
    """Sequences per forward pass of evaluation; default: --micro-batch-size."""

    skip_train: bool = False
    """Evaluate only."""

    full_validation: bool = False
    """Evaluate on the full validation set each time."""

    multiple_validation_sets: bool = False
    """Evaluate on each of several validation sets separately. Requires --full-validation."""

    validation_set_names: list[str] | None = None
    """Names of the validation sets in the log, in the order of their paths."""

    eval_tasks: list[str] | None = None
    """Tasks of lm-evaluation-harness to score during training. Requires --eval-tasks-interval and lm-eval."""

    eval_tasks_interval: PositiveInt | None = None
    """Iterations between scores of --eval-tasks."""

    eval_tasks_limit: PositiveInt | None = None
    """Documents per task; default: all."""

    eval_tasks_path: str | None = None
    """Folder with the YAML files of more tasks."""

    sample_prompts: list[str] | None = None
    """Texts that the model continues during and after training, to show what it writes. @FILE: one prompt per line of
    a file; an empty text: a new document."""

    sample_interval: PositiveInt | None = None
    """Iterations between samples; default: at each evaluation. Requires --sample-prompts."""

    sample_tokens: Dim = 64
    """Maximum tokens of a sample."""

    sample_temperature: Annotated[float, Range(0, 1000)] = 0.0
    """Temperature of samples, drawn with --seed; 0: always the likeliest token."""


def eval_samples(cfg: ValidationConfig) -> int:
    """Return the samples of one evaluation of --eval-iters global batches."""
    return cfg.eval_iters * (cfg.eval_global_batch_size or 0)


def num_evaluations(cfg: ValidationConfig, train_iters: int | None) -> int:
    """Return how many evaluations Megatron-LM builds its validation data for: one per --eval-interval from
    --start-eval-at-iter on, and one after training. ``resolve`` derives train_iters from --train-samples."""
    if cfg.skip_train or not cfg.eval_interval:
        return 1
    skipped = (cfg.start_eval_at_iter or 0) // cfg.eval_interval
    return max((train_iters or 0) // cfg.eval_interval + 1 - skipped, 1)
