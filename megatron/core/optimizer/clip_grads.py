"""Norms and counts over the whole model, each unique parameter once.

A parameter that is sharded over an axis contributes its shards; one that is replicated there contributes from the axis'
rank 0 alone. Which it is follows from its placement (``parameter.spec``). Data-parallel ranks hold equal gradients and
are not added up, unless each has a shard of its own (``shards``: the group of those that do).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.sharding import placement

UNSHARDED = Group("unsharded")
_BATCH = 1 << 28  # elements: 1 GB in fp32


def is_counted_here(parameter: nn.Parameter, groups: ProcessGroups) -> bool:
    """Whether this rank contributes ``parameter`` (or its shard of it) to a sum over the model."""
    return placement.is_counted_here(getattr(parameter, "spec", None), groups)


def sum_over_model(value: Tensor, groups: ProcessGroups, shards: Group = UNSHARDED) -> Tensor:
    """``value`` summed, in place, over the ranks that together hold one copy of the model (and of its shards)."""
    for group in (shards, groups.tp_pp):
        if group.size > 1:
            dist.all_reduce(value, group=group.handle)
    return value


def l2_norm(
    tensors: Iterable[Tensor], device: torch.device, groups: ProcessGroups, shards: Group = UNSHARDED
) -> Tensor:  # fmt: skip
    """L2 norm over all ``tensors`` of the model as an fp64 scalar on ``device``.

    One pass over memory: a tensor's sum of squares in fp32 (fp64 for fp64), in an order that depends on its size alone;
    theirs in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    norms = [norm.to(torch.float64) for batch in _batches(tensors) for norm in _norms(batch)]
    if norms:
        total = torch.stack(norms).square().sum()
    return sum_over_model(total, groups, shards).sqrt()


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of one dtype, cut so that tensors made for this (masters put together) do not exist all at once."""
    batch: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if batch and (tensor.dtype != batch[0].dtype or elements > _BATCH):
            yield batch
            batch, elements = [], 0
        batch.append(tensor)
        elements += tensor.numel()
    if batch:
        yield batch


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    dtype = None if tensors[0].dtype == torch.float64 else torch.float32
    return torch._foreach_norm(tensors, 2, dtype=dtype)


def count_zeros(
    tensors: Iterable[Tensor], device: torch.device, groups: ProcessGroups, shards: Group = UNSHARDED
) -> Tensor:  # fmt: skip
    """Number of elements that are exactly zero, over the model, as an int64 scalar on ``device``."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total += tensor.numel() - torch.count_nonzero(tensor)
    return sum_over_model(total, groups, shards)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that brings a norm down to ``max_norm``: min(1, max_norm / (norm + 1e-6))."""
    return (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
