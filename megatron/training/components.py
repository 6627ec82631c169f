"""The parts of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed import DataParallel
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.schedules.learning_rate import OptimizerParamScheduler
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.evaluate import EvalSet
from megatron.training.hooks.base import Hook
from megatron.training.tasks.base import Task
from megatron.training.train_state import TrainState


@dataclass
class Components:
    """The parts of a run, built by ``megatron.training.run``."""

    task: Task
    groups: ProcessGroups
    model: list[DataParallel]
    optimizer: Any
    scheduler: OptimizerParamScheduler | None
    state: TrainState
    checkpointer: Checkpointer
    datasets: tuple[Any, Any, Any] = (None, None, None)
    """For training, validation and test, as the task provides them."""
    train_iterator: Iterator[dict] | None = None
    valid_sets: list[EvalSet] = field(default_factory=list)
    test_sets: list[EvalSet] = field(default_factory=list)
    hooks: Sequence[Hook] = ()
