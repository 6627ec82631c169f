from megatron.core.distributed.data_parallel import DataParallel, unwrapped
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.replicas import check_replicas

__all__ = [
    "DataParallel", "DistributedDataParallel", "DistributedDataParallelConfig", "check_replicas",
    "finalize_model_grads", "unwrapped",
]  # fmt: skip
