from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError, CheckpointWriteError
from megatron.core.dist_checkpointing.nested import load, save
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.sharding.sharded_tensor import ShardedTensor

__all__ = [
    "CheckpointDamagedError", "CheckpointError", "CheckpointReader", "CheckpointWriteError", "ShardedTensor", "load",
    "save",
]  # fmt: skip
