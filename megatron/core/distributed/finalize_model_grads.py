"""Gradient finalization between the last backward pass and the optimizer: reduce over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.partial_gradients import sum_partial_gradients
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.statistics import StatisticsSum


def finalize_model_grads(
    model_chunks: Sequence[DataParallel], num_tokens: Tensor | None = None, *,
    groups: ProcessGroups | None = None, sum_statistics: bool = True, **unused: Any,
) -> Tensor | None:  # fmt: skip
    """Sum gradients over data-parallel ranks and reduce partial gradients. Collective over all ranks. ``num_tokens``:
    valid tokens of this rank's micro-batches, a scalar on the device, 0 on stages without the loss, if backward ran on
    sums of token losses: gradients are then divided by the valid tokens of the global batch, which are returned (fp64
    scalar; a copy is all-reduced). None: losses were weighted before. A batch without valid tokens keeps zero
    gradients. ``groups`` None uses ``parallel_state``. ``sum_statistics``: also all-reduce module statistics, which
    updates the expert bias of routers; False if the caller runs a ``StatisticsSum``, because the sum consumes them."""
    for chunk in model_chunks:
        chunk.finish_grad_sync()
    groups = groups or parallel_state.get_process_groups()
    sum_partial_gradients(model_chunks, groups)
    if sum_statistics and model_chunks:
        _sum_statistics(model_chunks, groups)
    for chunk in model_chunks:
        for stack in chunk.fp8_stacks:
            stack.end_step(groups)
    if num_tokens is None:
        return None
    total = num_tokens.detach().to(torch.float64).clone()
    for group in (groups.dp_cp, groups.pp):
        if group.size > 1:
            dist.all_reduce(total, group=group.handle)
    for chunk in model_chunks:
        chunk.scale_gradients(1.0 / total.clamp(min=1.0))
    return total


def _sum_statistics(model_chunks: Sequence[DataParallel], groups: ProcessGroups) -> None:
    first = model_chunks[0]
    if first.statistics_sum is None:  # once: the constructor is a collective over the pipeline
        first.statistics_sum = StatisticsSum(model_chunks, groups)
    first.statistics_sum(next(first.parameters()).device)
