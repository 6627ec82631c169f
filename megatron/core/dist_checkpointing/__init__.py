"""Sharded checkpoints. Names of this package load on first use: manifests are read without torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError, CheckpointWriteError

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.nested import load, save
    from megatron.core.dist_checkpointing.reader import CheckpointReader
    from megatron.core.sharding.sharded_tensor import ShardedTensor

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriteError",
    "ShardedTensor",
    "load",
    "save",
]
_MODULES = {
    "CheckpointReader": "dist_checkpointing.reader",
    "ShardedTensor": "sharding.sharded_tensor",
    "load": "dist_checkpointing.nested",
    "save": "dist_checkpointing.nested",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron.core.{_MODULES[name]}"), name)
