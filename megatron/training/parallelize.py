"""From a task's model to what the loop trains: one ordered list of wrappings, data parallelism last."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups import ProcessGroups
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.tasks.base import Task

logger = logging.getLogger(__name__)


def build_model(task: Task, device: torch.device) -> list[nn.Module]:
    """The task's model chunks on ``device`` (one chunk without a virtual pipeline)."""
    return [task.model_provider(pre_process=True, post_process=True).to(device)]


def parallelize(
    model_chunks: Sequence[nn.Module], cfg: PretrainConfig, groups: ProcessGroups
) -> list[DistributedDataParallel]:
    """Wraps every chunk for data parallelism: gradients accumulate in contiguous buffers and are summed over ``dp``."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=cfg.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=cfg.overlap_grad_reduce,
        overlap_param_gather=cfg.overlap_param_gather,
        use_distributed_optimizer=cfg.use_distributed_optimizer,
        bucket_size=cfg.ddp_bucket_size,
        num_buckets=cfg.ddp_num_buckets,
        pad_buckets_for_high_nccl_busbw=cfg.ddp_pad_buckets_for_high_nccl_busbw,
        reduce_scatter_with_fp32_accumulation=cfg.ddp_reduce_scatter_with_fp32_accumulation,
    )
    return [DistributedDataParallel(None, ddp, chunk, groups=groups) for chunk in model_chunks]


def report_parameters(model_chunks: Sequence[nn.Module], groups: ProcessGroups) -> None:
    """The parameter count of this rank, in the form that users' scripts look for."""
    count = sum(parameter.numel() for chunk in model_chunks for parameter in chunk.parameters())
    logger.info(
        " > number of parameters on (tensor, pipeline) model parallel rank (%d, %d): %d",
        groups.tp.rank, groups.pp.rank, count,
    )
