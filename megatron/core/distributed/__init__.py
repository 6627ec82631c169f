from megatron import serve_other_names
from megatron.core.distributed.data_parallel import DataParallel, unwrapped
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.replicas import check_replicas
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel

__all__ = [
    "DataParallel", "DistributedDataParallel", "DistributedDataParallelConfig", "TorchFullyShardedDataParallel",
    "check_replicas", "finalize_model_grads", "unwrapped",
]  # fmt: skip

serve_other_names(__name__)
