"""Contents of a checkpoint as they live on this rank: tensors under global names, and JSON objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megatron.core.fp8.recipe import scale_tensors
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedules.learning_rate import OptimizerParamScheduler
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors
from megatron.training.checkpoint.environment import environment, software_versions
from megatron.training.checkpoint.random_states import rng_tensors
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import config_to_dict
from megatron.training.train_state import TrainState


@dataclass(frozen=True)
class LiveState:
    """State of a run on this rank that checkpoints store."""

    cfg: PretrainConfig
    chunks: Sequence[nn.Module]
    """Unwrapped model chunks."""
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    groups: ProcessGroups
    tokenizer: str | None
    """Fingerprint of the tokenizer."""
    base: Mapping[str, str] | None = None
    """Folder and identity of frozen weights that checkpoints do not contain (``base_weights.py``)."""

    def tensors(
        self, *, optimizer: dict[str, object] | None, rng: bool, scales: bool = True, rounded: bool = False
    ) -> dict[str, ShardedTensor]:
        """Return all stored tensors by global name, as references to live memory. ``rounded``, for saves: weights that
        are kept in higher precision become copies in their stored dtype. ``optimizer``: state dict, or None. Weights
        come first: main parameters may share their memory. ``scales``: delayed fp8 scales. Random states are copies."""
        tensors: dict[str, ShardedTensor] = {}
        for chunk in self.chunks:
            tensors |= module_tensors(
                chunk, prefix="model.", groups=self.groups, rounded=rounded, includes=self.cfg.stores
            )
        if optimizer is not None and self.optimizer is not None:
            tensors |= self.optimizer.sharded_tensors("optimizer.", optimizer)
        if scales:
            tensors |= scale_tensors(self.chunks)
        if rng:
            tensors |= rng_tensors(self.groups.world.rank, self.groups.world.size)
        return tensors

    def objects(self, state: TrainState, optimizer: dict[str, object] | None) -> dict[str, object]:
        """Return the state stored as JSON: iteration, counters, settings, tokenizer fingerprint, versions, environment,
        of the state dict ``optimizer`` (None: absent) only step and loss scaler, and the scheduler if there is one."""
        objects: dict[str, object] = {
            "iteration": state.iteration,
            "train_state": state.to_dict(),
            "args": config_to_dict(self.cfg.flat),
            "tokenizer": self.tokenizer,
            "versions": software_versions(),
            "environment": environment(),
        }
        if optimizer is not None:
            objects["optimizer"] = {key: optimizer[key] for key in ("step", "grad_scaler")}
        if self.base is not None:
            objects["base"] = dict(self.base)
        if self.scheduler is not None:
            objects["scheduler"] = self.scheduler.state_dict()
        return objects

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """(Tensor rank, tensor size, pipeline rank, pipeline size); ranks count from 1."""
        tp, pp = self.groups.tp, self.groups.pp
        return tp.rank + 1, tp.size, pp.rank + 1, pp.size
