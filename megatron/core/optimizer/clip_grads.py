"""Norms and counts over the whole model, each unique parameter once.

A parameter that is sharded over an axis contributes its shards; one that is replicated there contributes from the axis'
rank 0 alone. Which it is follows from its placement (``parameter.spec``). Data-parallel ranks hold equal gradients and
are not added up, unless each has a shard of its own (``shards``: the group of those that do).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import placement
from megatron.core.process_groups import Group, ProcessGroups

UNSHARDED = Group("unsharded")


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
    tensors: Sequence[Tensor], device: torch.device, groups: ProcessGroups, shards: Group = UNSHARDED
) -> Tensor:  # fmt: skip
    """L2 norm over all ``tensors`` of the model as an fp64 scalar on ``device``; the sum of squares is fp64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if tensors:
        norms = torch._foreach_norm(list(tensors))
        total = torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()
    return sum_over_model(total, groups, shards).sqrt()


def count_zeros(
    tensors: Sequence[Tensor], device: torch.device, groups: ProcessGroups, shards: Group = UNSHARDED
) -> int:  # fmt: skip
    """Number of elements that are exactly zero, over the model."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total += tensor.numel() - torch.count_nonzero(tensor)
    return int(sum_over_model(total, groups, shards).item())


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that brings a norm down to ``max_norm``: min(1, max_norm / (norm + 1e-6))."""
    return min(1.0, max_norm / (norm + 1.0e-6))
