"""What the checkpoints of a run hold, as it lives on this rank: tensors under global names, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedules.learning_rate import OptimizerParamScheduler
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors
from megatron.training.arguments import config_to_dict
from megatron.training.checkpoint.random_states import rng_tensors
from megatron.training.checkpoint.settings import software_versions
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.train_state import TrainState


@dataclass(frozen=True)
class LiveState:
    """A run on this rank."""

    cfg: PretrainConfig
    chunks: Sequence[nn.Module]
    """The model's, not wrapped."""
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    groups: ProcessGroups
    tokenizer: Any
    """Its fingerprint."""

    def tensors(
        self, *, optimizer: dict[str, Any] | None, rng: bool, rounded: bool = False
    ) -> dict[str, ShardedTensor]:
        """Everything that is stored as tensors, under global names; ``rounded`` as it is stored, else as it lives.

        Weights come before the main parameters, of which they may be roundings in the same memory. ``optimizer``: its
        state, if wanted.
        """
        tensors: dict[str, ShardedTensor] = {}
        for chunk in self.chunks:
            tensors |= module_tensors(chunk, prefix="model.", groups=self.groups, rounded=rounded)
        if optimizer is not None and self.optimizer is not None:
            tensors |= self.optimizer.sharded_tensors("optimizer.", optimizer)
        if rng:
            tensors |= rng_tensors(self.groups.world.rank, self.groups.world.size)
        return tensors

    def objects(self, state: TrainState, optimizer: dict[str, Any] | None) -> dict[str, Any]:
        """Everything that is stored as JSON."""
        objects: dict[str, Any] = {
            "iteration": state.iteration,
            "train_state": state.to_dict(),
            "args": config_to_dict(self.cfg),
            "tokenizer": self.tokenizer,
            "versions": software_versions(),
        }
        if optimizer is not None:
            objects["optimizer"] = {key: optimizer[key] for key in ("step", "grad_scaler")}
        if self.scheduler is not None:
            objects["scheduler"] = self.scheduler.state_dict()
        return objects

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """Tensor rank and size, pipeline rank and size, counted from 1."""
        tp, pp = self.groups.tp, self.groups.pp
        return tp.rank + 1, tp.size, pp.rank + 1, pp.size
