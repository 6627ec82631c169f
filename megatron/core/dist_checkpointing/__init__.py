"""Sharded checkpoints. Names of this package load on first use (``compat/names.tsv``):
manifests are read without torch."""

from typing import TYPE_CHECKING

from megatron import serve_other_names
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

serve_other_names(__name__)
