"""Process groups and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.ranges import Minutes, NumRanks, PositiveInt, Range
from megatron.training.config.launcher import local_rank


@dataclass(kw_only=True)
class DistributedConfig:
    """Process groups and data parallelism"""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; default: nccl, or gloo on a machine without GPUs."""

    distributed_timeout_minutes: Minutes = 10
    """Minutes after which a collective that hangs is given up."""

    distributed_timeout_seconds_after_init: Annotated[int, Range(1, 10 * 366 * 86400)] | None = None
    """Shorter limit, in seconds, once the first iteration is done."""

    use_tp_pp_dp_mapping: bool = False
    """Put pipeline stages on neighbouring ranks, and data parallelism outermost: order tp-cp-ep-pp-dp."""

    nccl_communicator_config_path: str | None = None
    """YAML file with NCCL settings per group, such as `tp: {max_ctas: 8}`."""

    local_rank: Annotated[int, Range(0, 2**20)] = flag("--local-rank", default_factory=local_rank)
    """Rank within this node; the launcher sets it through LOCAL_RANK."""

    enable_gloo_process_groups: bool = flag("--disable-gloo-process-groups", default=True)
    """Create no gloo groups beside those of NCCL."""

    use_distributed_optimizer: bool = False
    """Split optimizer state and float32 weights over the data-parallel ranks (ZeRO 1)."""

    num_distributed_optimizer_instances: NumRanks = 1
    """Copies of the split optimizer state; more copies mean smaller groups."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass already runs. Needs --use-distributed-optimizer and
    --overlap-grad-reduce."""

    overlap_param_gather_with_optimizer_step: bool = False
    """Gather the first chunk's weights while the optimizer still steps; interleaved schedules only."""

    align_grad_reduce: bool = flag("--no-align-grad-reduce", "--disable-align-grad-reduce", default=True)
    """Let pipeline stages start their gradient reductions independently."""

    align_param_gather: bool = True
    """Let pipeline stages start their weight gathers independently."""

    ddp_num_buckets: Annotated[int, Range(1, 2**20)] | None = None
    """Gradient buckets, about: parameters are not cut. Instead of --ddp-bucket-size."""

    ddp_bucket_size: PositiveInt | None = None
    """Elements per gradient bucket; default: with overlap max(40 million, 1 million x data-parallel size), else one
    bucket."""

    ddp_reduce_scatter_with_fp32_accumulation: bool = False
    """With --grad-reduce-in-bf16: send gradients in bfloat16, but add them up in float32."""

    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets so that message sizes are powers of two."""

    ddp_average_in_collective: bool = False
    """Divide by the number of ranks inside the collective. Gradients here are sums scaled once, so there is nothing to
    divide."""

    use_megatron_fsdp: bool = False
    """Shard weights, gradients and optimizer state as --data-parallel-sharding-strategy says."""

    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "optim_grads_params"
    )
    """What --use-megatron-fsdp shards (ZeRO 0 to 3)."""

    use_torch_fsdp2: bool = False
    """Shard weights, gradients and optimizer state with torch's fully_shard."""

    torch_fsdp2_reshard_after_forward: bool = flag("--torch-fsdp2-no-reshard-after-forward", default=True)
    """Keep gathered weights from the forward to the backward pass."""
