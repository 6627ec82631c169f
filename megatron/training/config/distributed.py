"""Process groups and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Minutes, NumRanks, PositiveInt, Range


@dataclass(kw_only=True)
class DistributedConfig(FlagGroup):
    """Process groups and data parallelism"""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; default: nccl, or gloo on a machine without GPUs."""

    distributed_timeout_minutes: Minutes = 10
    """Time-out of a collective, in minutes."""

    use_tp_pp_dp_mapping: bool = False
    """Place pipeline stages on adjacent ranks, and data parallelism outermost: order tp-cp-ep-pp-dp."""

    nccl_communicator_config_path: str | None = None
    """YAML file with NCCL settings per group, such as `tp: {max_ctas: 8}`."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state and float32 weights over the data-parallel ranks (ZeRO-1)."""

    num_distributed_optimizer_instances: NumRanks = 1
    """Copies of the sharded optimizer state; more copies mean smaller groups."""

    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""

    overlap_param_gather: bool = False
    """Overlap the all-gather of updated weights with the next forward pass. Requires --use-distributed-optimizer and
    --overlap-grad-reduce."""

    ddp_num_buckets: Annotated[int, Range(1, 2**20)] | None = None
    """Approximate number of gradient buckets (parameters are not split). Alternative to --ddp-bucket-size."""

    ddp_bucket_size: PositiveInt | None = None
    """Elements per gradient bucket; default: with overlap max(40 million, 1 million x data-parallel size), else one
    bucket."""

    ddp_reduce_scatter_with_fp32_accumulation: bool = False
    """With --grad-reduce-in-bf16: send gradients in bfloat16, but sum them in float32."""

    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets so that message sizes are powers of two."""

    use_torch_fsdp2: bool = False
    """Shard weights, gradients and optimizer state with torch's fully_shard."""

    torch_fsdp2_reshard_after_forward: bool = flag("--torch-fsdp2-no-reshard-after-forward", default=True)
    """Free gathered weights after the forward pass and gather them again in backward."""
