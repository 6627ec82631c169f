"""Build and wrap the model chunks of a task for training; data parallelism is the outermost wrapper."""

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
from megatron.core.models.backends import kernel_summary
from megatron.core.optimizer.rule_choice import declare_update_rules
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.core.sharding.placement import adopt_declarations, require_declarations
from megatron.core.transformer.transformer_block import LayerList
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import training_device
from megatron.training.tasks.base import Task

logger = logging.getLogger(__name__)


def build_model(task: Task, device: torch.device) -> list[nn.Module]:
    """Return the task's model chunks on ``device``: one, or several with virtual pipeline stages, whose virtual rank is
    set during each build. Attaches specs to parameters that carry Megatron-LM's sharding attributes. Raises UserError
    if sequence parallelism is on and a parameter does not declare whether its gradient must be reduced."""
    pp, num_chunks = parallel_state.get_process_groups().pp, virtual_pipeline_size(task.cfg.model)
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
        for transform in task.cfg.transforms:
            transform.apply(model, parallel_state.get_process_groups())
        if task.cfg.model.sequence_parallel:
            require_declarations(model)
    return chunks


@contextmanager
def building_chunk(chunk: int | None) -> Iterator[None]:
    """Context manager: set the virtual pipeline rank in ``parallel_state`` to ``chunk`` while a model provider builds
    this chunk, then reset it to None, also after an error. ``chunk`` None has no effect."""
    if chunk is None:
        yield
        return
    parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(None)


def parallelize(model_chunks: Sequence[nn.Module], cfg: PretrainConfig, groups: ProcessGroups) -> list[DataParallel]:
    """Wrap every chunk for data parallelism over ``dp_cp``: ``fully_shard`` with --use-torch-fsdp2 and more than one
    such rank, else gradient buffers with full weights. Declares update rules that own matrices first."""
    for chunk in model_chunks:  # before shards are cut
        declare_update_rules(chunk, cfg.optimizer)
    distributed = cfg.distributed
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=cfg.optimizer.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=distributed.overlap_grad_reduce,
        overlap_param_gather=distributed.overlap_param_gather,
        use_distributed_optimizer=distributed.use_distributed_optimizer,
        bucket_size=distributed.ddp_bucket_size,
        num_buckets=distributed.ddp_num_buckets,
        pad_buckets_for_high_nccl_busbw=distributed.ddp_pad_buckets_for_high_nccl_busbw,
        reduce_scatter_with_fp32_accumulation=distributed.ddp_reduce_scatter_with_fp32_accumulation,
    )
    if distributed.use_torch_fsdp2 and groups.dp_cp.size > 1:
        reshard = distributed.torch_fsdp2_reshard_after_forward
        return [
            TorchFullyShardedDataParallel(
                ddp, chunk, transformer_layers(chunk), groups, reshard_after_forward=reshard, last=output_layer(chunk)
            )
            for chunk in model_chunks
        ]
    if distributed.use_torch_fsdp2:
        logger.info("--use-torch-fsdp2: only one data-parallel rank: weights are not sharded")
    return [DistributedDataParallel(None, ddp, chunk, groups=groups) for chunk in model_chunks]


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """Return all transformer layers of a chunk, the units that FSDP gathers one by one."""
    return [layer for stack in model.modules() if isinstance(stack, LayerList) for layer in stack]


def output_layer(model: nn.Module) -> nn.Module | None:
    """Return the output layer of a chunk if it has a weight of its own."""
    layer = getattr(model, "output_layer", None)
    return None if getattr(layer, "weight", None) is None else layer


def report_choices(model_chunks: Sequence[nn.Module], fp8: str | None) -> None:
    """Log the selected layer implementations and attention kernels with reasons, and that a CPU emulates ``fp8``."""
    for line in kernel_summary(model_chunks):
        logger.info("%s", line)
    if fp8 is not None and training_device().type == "cpu":
        logger.info("--fp8-format %s: emulated on the CPU, slower than --bf16", fp8)


def report_parameters(model_chunks: Sequence[nn.Module], groups: ProcessGroups) -> None:
    """Log the parameter count of each model-parallel rank, one line each, in Megatron-LM's form that scripts parse.
    Collective over ``tp_pp``; waits for the device. FSDP shards count at their global size."""
    count = sum(parameter.numel() for chunk in model_chunks for parameter in chunk.parameters())
    counts = torch.tensor([count], device=training_device())
    if groups.tp_pp.size > 1:
        gathered = [torch.empty_like(counts) for _ in groups.tp_pp.ranks]
        dist.all_gather(gathered, counts, group=groups.tp_pp.handle)
        counts = torch.cat(gathered)
    for index, each in enumerate(counts.tolist()):  # every rank order varies the tensor rank fastest
        logger.info(
            " > number of parameters on (tensor, pipeline) model parallel rank (%d, %d): %d",
            index % groups.tp.size,
            index // groups.tp.size,
            each,
        )
