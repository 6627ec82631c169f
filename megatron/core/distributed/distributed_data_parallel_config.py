"""Configuration of the data-parallel gradient buffers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.absent import TakesSettings


@dataclass(kw_only=True)
class DistributedDataParallelConfig(metaclass=TakesSettings):
    """Gradient buffer settings: dtype, bucket size, reduction and overlap. Fields follow Megatron-LM."""

    grad_reduce_in_fp32: bool = False
    """Whether gradients of bf16 and fp16 parameters are accumulated and reduced in fp32."""

    overlap_grad_reduce: bool = False
    """Whether the reduction of a bucket starts in backward, as soon as the gradients of the bucket are complete."""

    overlap_param_gather: bool = False
    """Whether the all-gather of updated weights overlaps with the next forward. Distributed optimizer only."""

    use_distributed_optimizer: bool = False
    """Whether optimizer state is sharded over data-parallel ranks (ZeRO-1): gradients are then reduce-scattered."""

    num_distributed_optimizer_instances: int = 1
    """Number of copies of the sharded optimizer state; it is sharded within each instance."""

    bucket_size: int | None = None
    """Minimum elements per bucket. None: a single bucket without overlap, else max(40 million, 1 million x ranks)."""

    num_buckets: int | None = None
    """Approximate number of buckets; overrides ``bucket_size``. Parameters are never split over buckets."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """Whether half-precision gradients are sent in half precision but summed in fp32. Distributed optimizer only."""

    pad_buckets_for_high_nccl_busbw: bool = False
    """Whether bucket sizes are padded to a multiple of 2^16 elements, for NCCL bandwidth."""

    fp8_param_gather: bool = False
    """Accepted for programs; each weight declares its storage, which decides about the bytes of its all-gather."""

    delay_wgrad_compute: bool = False
    """Accepted for programs; gradients are reduced when they exist."""
