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
    """Sum gradients over data-parallel ranks and reduce partial gradients. Collective over all ranks.

    Args:
        num_tokens: valid tokens of this rank's micro-batches, a scalar on the model's device, 0 on pipeline stages
            without the loss, if backward ran on sums of token losses: gradients are then divided by the valid tokens of
            the global batch. Not changed (a copy is all-reduced over ``dp_cp`` and ``pp``). None: losses were weighted
            before.
        sum_statistics: whether to also all-reduce module statistics, which updates the expert bias of routers. Pass
            False if the caller runs a ``StatisticsSum`` itself; otherwise the statistics would be consumed here.
        unused: further arguments of Megatron-LM; ignored.

    Returns:
        Valid tokens of the global batch (fp64 scalar on the device), or None without ``num_tokens``. For a batch
        without valid tokens the gradients stay zero.
    """
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
    """Collective over the world; the first call also builds the ``StatisticsSum``, kept on the first chunk."""
    first = model_chunks[0]
    if first.statistics_sum is None:  # once: the constructor is a collective over the pipeline
        first.statistics_sum = StatisticsSum(model_chunks, groups)
    first.statistics_sum(next(first.parameters()).device)
