"""Components of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from megatron.core.distributed import DataParallel
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.runtime import ForwardEvent
from megatron.core.schedules.learning_rate import OptimizerParamScheduler
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.data.loader import BatchReader
from megatron.training.evaluate import EvalSet
from megatron.training.hooks.base import Hook
from megatron.training.start.companions import Companion, pair_stages
from megatron.training.tasks.base import Task
from megatron.training.train_state import TrainState


@dataclass
class Components:
    """Model, optimizer, data and other components of a run, built by ``megatron.training.run``."""

    task: Task
    groups: ProcessGroups
    model: list[DataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler | None
    state: TrainState
    checkpointer: Checkpointer
    datasets: tuple[object, object, object] = (None, None, None)
    """Training, validation and test data, as provided by the task."""
    reader: BatchReader | None = None
    """Training batches; None with --skip-train."""
    valid_sets: list[EvalSet] = field(default_factory=list)
    test_sets: list[EvalSet] = field(default_factory=list)
    hooks: Sequence[Hook] = ()
    on_forward: Callable[[ForwardEvent, bool], None] | None = None
    """Called with the events of every forward step (see ``Work``)."""
    companions: Sequence[Companion] = ()
    """Frozen models next to ``model``."""

    @property
    def num_samples(self) -> int | None:
        """Samples of training data after which the run stops; None: the data has no end, or no length."""
        is_single = self.task.cfg.data.dataloader_type == "single"
        return len(self.datasets[0]) if is_single and isinstance(self.datasets[0], Sized) else None

    @cached_property
    def stages(self) -> Sequence[nn.Module]:
        """Chunks that schedules run: each chunk of ``model``, paired with the same chunk of all companions."""
        return pair_stages(self.model, self.companions, self.groups)
