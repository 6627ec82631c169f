"""From a task's model to what the loop trains: one ordered list of wrappings, data parallelism last."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_layout import virtual_pipeline_size
from megatron.core.process_groups import ProcessGroups
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.tasks.base import Task

logger = logging.getLogger(__name__)


def build_model(task: Task, device: torch.device) -> list[nn.Module]:
    """The task's model chunks on ``device``: one, or with virtual pipeline stages several."""
    pp, num_chunks = parallel_state.get_process_groups().pp, virtual_pipeline_size(task.cfg)
    takes_stage = "vp_stage" in inspect.signature(task.model_provider).parameters
    chunks = []
    for chunk in range(num_chunks):
        stage: dict[str, Any] = {"vp_stage": chunk} if takes_stage and num_chunks > 1 else {}
        with building_chunk(chunk if num_chunks > 1 else None):
            model = task.model_provider(
                pre_process=pp.is_first and chunk == 0, post_process=pp.is_last and chunk == num_chunks - 1, **stage
            )
        chunks.append(model.to(device))
    return chunks


@contextmanager
def building_chunk(chunk: int | None) -> Iterator[None]:
    """While a provider runs, ``parallel_state`` says which chunk of the rank it builds."""
    if chunk is None:
        yield
        return
    parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(None)


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
