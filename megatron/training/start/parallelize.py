"""From a task's model to what the loop trains: one ordered list of wrappings, data parallelism last."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import (
    DataParallel,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
)
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.backends import describe_choices
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.core.sharding.placement import adopt_declarations, require_declarations
from megatron.core.transformer.transformer_block import LayerList
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import training_device
from megatron.training.tasks.base import Task

logger = logging.getLogger(__name__)


def build_model(task: Task, device: torch.device) -> list[nn.Module]:
    """The task's model chunks on ``device``: one, or with virtual pipeline stages several.

    UserError where ranks split sequences and a module's parameter does not say whether its gradient must be added up.
    """
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
    for model in chunks:
        adopt_declarations(model, parallel_state.get_process_groups())
        if task.cfg.sequence_parallel:
            require_declarations(model)
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
) -> list[DataParallel]:
    """Wraps every chunk for data parallelism, which sums gradients over the ranks of ``dp_cp``.

    ``fully_shard`` where --use-torch-fsdp2 asks for it and there is more than one such rank, else gradient buffers with
    whole weights (and with --use-distributed-optimizer a sharded update).
    """
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
    if cfg.use_torch_fsdp2 and groups.dp_cp.size > 1:
        reshard = cfg.torch_fsdp2_reshard_after_forward
        return [
            TorchFullyShardedDataParallel(ddp, chunk, layers_of(chunk), groups, reshard_after_forward=reshard)
            for chunk in model_chunks
        ]
    if cfg.use_torch_fsdp2:
        logger.info("--use-torch-fsdp2: one data-parallel rank, whose shards are the whole weights")
    return [DistributedDataParallel(None, ddp, chunk, groups=groups) for chunk in model_chunks]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Every transformer layer of a chunk: the units that are gathered one after another."""
    return [layer for stack in model.modules() if isinstance(stack, LayerList) for layer in stack]


def report_choices(model_chunks: Sequence[nn.Module]) -> None:
    """Log what was built: implementations of layers, attention kernels and the reasons for them."""
    for line in describe_choices(model_chunks):
        logger.info("%s", line)


def report_parameters(model_chunks: Sequence[nn.Module], groups: ProcessGroups) -> None:
    """The parameter count of every model-parallel rank, in the form that users' scripts look for."""
    count = sum(parameter.numel() for chunk in model_chunks for parameter in chunk.parameters())
    counts = torch.tensor([count], device=training_device())
    if groups.tp_pp.size > 1:
        gathered = [torch.empty_like(counts) for _ in groups.tp_pp.ranks]
        dist.all_gather(gathered, counts, group=groups.tp_pp.handle)
        counts = torch.cat(gathered)
    for index, each in enumerate(counts.tolist()):  # tensor-parallel ranks come first in every rank order
        logger.info(
            " > number of parameters on (tensor, pipeline) model parallel rank (%d, %d): %d",
            index % groups.tp.size, index // groups.tp.size, each,
        )
