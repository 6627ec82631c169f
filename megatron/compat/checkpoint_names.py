"""Names of sharded checkpoints: annotations, and strategies that programs choose although all ranks write here."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, NoReturn

from megatron.core.config.errors import UserError

ShardedStateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]


class StrictHandling(Enum):
    """Answers to names that only a checkpoint or only a program has; every one is an error here."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"


class Strategy(NamedTuple):
    """A way of writing or reading that programs pass to ``save`` and ``load``, where it changes nothing."""

    name: str


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> Strategy:
    """Return a placeholder: checkpoints are written by all ranks, as safetensors."""
    return Strategy(backend)


def get_default_load_sharded_strategy(checkpoint_dir: object) -> Strategy:
    """Return a placeholder: checkpoints are read by all ranks."""
    return Strategy("torch_dist")


def TorchDistSaveShardedStrategy(backend: str = "torch_dist", version: int = 1, **_: object) -> Strategy:
    """Placeholder: checkpoints are written by all ranks, as safetensors."""
    return get_default_save_sharded_strategy(backend, version)


def TorchDistLoadShardedStrategy(*_: object, **__: object) -> Strategy:
    """Return a placeholder: checkpoints are read by all ranks."""
    return Strategy("torch_dist")


def FullyParallelSaveStrategyWrapper(strategy: Strategy, *_: object, **__: object) -> Strategy:
    """Return ``strategy``: all ranks write."""
    return strategy


def FullyParallelLoadStrategyWrapper(strategy: Strategy, *_: object, **__: object) -> Strategy:
    """Return ``strategy``: each rank reads what it needs."""
    return strategy


class _NotStored:
    def __init__(self, *_: object, **__: object) -> None:
        fail(type(self).__name__)


class ShardedObject(_NotStored):
    """An object of a rank; checkpoints hold tensors and JSON values."""


class ShardedTensorFactory(_NotStored):
    """A tensor that is stored as several; a parameter's placement says that."""


class LocalNonpersistentObject(_NotStored):
    """A value that is not stored."""


def fail(name: str) -> NoReturn:
    """Raise UserError for a part of a state that cannot be stored."""
    raise UserError(f"{name}: not available here; sharded states hold ShardedTensor and JSON values")


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of keys and tensor names in place. Raises ValueError for a key without it."""
    from dataclasses import replace

    for key in list(sharded_state_dict):
        if not key.startswith(old_prefix):
            raise ValueError(f"replace_prefix_for_sharding: {key} does not begin with {old_prefix}")
        value = sharded_state_dict.pop(key)
        if (name := getattr(value, "name", None)) is not None and name.startswith(old_prefix):
            value = replace(value, name=new_prefix + name.removeprefix(old_prefix))
        sharded_state_dict[new_prefix + key.removeprefix(old_prefix)] = value
