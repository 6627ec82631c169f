"""Settings of the data-parallel gradient buffers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.absent import TakesSettings


@dataclass(kw_only=True)
class DistributedDataParallelConfig(metaclass=TakesSettings):
    """Settings of gradient buffers: how they are kept, reduced and overlapped."""

    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients in float32, whatever the parameters' dtype."""

    overlap_grad_reduce: bool = False
    """Start reducing a bucket as soon as its gradients are complete."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass already runs; distributed optimizer only."""

    use_distributed_optimizer: bool = False
    """Reduce-scatter gradients, because optimizer state is split over the ranks."""

    num_distributed_optimizer_instances: int = 1
    """Copies of the split optimizer state."""

    bucket_size: int | None = None
    """Elements per bucket; None: one bucket without overlap, else max(40 million, 1 million x ranks)."""

    num_buckets: int | None = None
    """Number of buckets (roughly: parameters are not cut), in the place of ``bucket_size``."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """Half-precision gradients travel as they are but are added up in float32; distributed optimizer only."""

    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets so that message sizes are powers of two."""
