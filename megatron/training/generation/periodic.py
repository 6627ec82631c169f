"""Work between iterations that reports records of the model under training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.generation.task_scores import TaskScores
from megatron.training.generation.text_samples import TextSamples
from megatron.training.observe.records import Record, RecordKind


class PeriodicWork(Protocol):
    """Work that the trainer runs on all ranks."""

    def is_due(self, iteration: int, evaluates: bool) -> bool:
        """``evaluates``: whether the validation sets were evaluated after ``iteration``."""

    def __call__(self, final: bool = False) -> Iterable[tuple[RecordKind, Record]]:
        """Return kind and values of records, equal on all ranks; ``final``: after training. Collective."""


def build_periodic_work(cfg: PretrainConfig, parts: Components) -> list[PeriodicWork]:
    """Return the work that flags request, in running order. Raises UserError for unusable tasks or prompts."""
    work: list[PeriodicWork] = []
    if cfg.validation.eval_tasks is not None:
        work.append(TaskScores(cfg, parts, parts.task.tokenizer))
    if cfg.validation.sample_prompts is not None:
        work.append(TextSamples(cfg, parts, parts.task.tokenizer))
    return work
