"""Components of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.core.distributed import DataParallel
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.runtime import ForwardEvent
from megatron.core.schedules.learning_rate import OptimizerParamScheduler
from megatron.core.transformer.qk_clip import QKClip
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.data.loader import BatchReader
from megatron.training.evaluate import EvalSet
from megatron.training.hooks.base import Hook
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
    qk_clip: QKClip | None = None
    """Maximum attention logits, for --qk-clip, --log-max-attention-logit and --log-layer-statistics-interval."""
    datasets: tuple[object, object, object] = (None, None, None)
    """Training, validation and test data, as provided by the task."""
    reader: BatchReader | None = None
    """Training batches; None with --skip-train."""
    valid_sets: list[EvalSet] = field(default_factory=list)
    test_sets: list[EvalSet] = field(default_factory=list)
    hooks: Sequence[Hook] = ()
    on_forward: Callable[[ForwardEvent, bool], None] | None = None
    """Called with the events of every forward step (see ``Work``)."""
