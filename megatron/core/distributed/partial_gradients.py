"""Gradients of which each rank holds a partial sum: added up over the ranks that hold the same elements.

Which parameters those are follows from their placement alone (``spec.grad``): norms and output biases under sequence
parallelism, norms of query and key heads, keys and values shared by several tensor-parallel ranks, copies of tied
embeddings. There is no list to forget an entry of.

The sums run after the data-parallel reduction. Sums over different axes commute, so the order changes no result beyond
rounding, and this one works for every kind of reduction: a bucket may be launched the moment its last gradient arrives
(a sum that had to come first would forbid that overlap), and where a bucket is reduce-scattered in place, each rank's
own shard of ``main_grad`` lies at the same elements on all ranks of the axis, since their buffers are laid out alike;
what stands outside of the shard is added up too and read by nobody. The cost is that of a few vectors per layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.sharding.placement import Partial, distinct_shard

_LARGE = 1 << 24
"""Elements from which a gradient is summed in its own memory instead of being packed with others."""


class _PartialSum(NamedTuple):
    gradient: Tensor
    shard: int
    """Which of ``num_shards`` different shards along the axis this rank holds a partial sum of."""
    num_shards: int


@torch.no_grad()
def sum_partial_gradients(modules: Iterable[nn.Module], groups: ProcessGroups) -> None:
    """Completes the gradients of every parameter of ``modules`` (this rank's chunks), in place.

    ``main_grad`` where there is one, else ``grad``. Collective over every axis that some placement names; all ranks of
    an axis must hold the same parameters with partial gradients over it.
    """
    waiting: dict[tuple[str, torch.dtype], list[_PartialSum]] = {}
    for axis, partial_sum in _partial_sums(modules, groups):
        waiting.setdefault((axis, partial_sum.gradient.dtype), []).append(partial_sum)
    for (axis, _), sums in waiting.items():
        _all_reduce(sums, getattr(groups, axis))


def _partial_sums(modules: Iterable[nn.Module], groups: ProcessGroups) -> Iterator[tuple[str, _PartialSum]]:
    for module in modules if groups.world.size > 1 else ():
        for parameter in module.parameters():
            spec = getattr(parameter, "spec", None)
            gradient = _gradient(parameter)
            if spec is None or gradient is None:
                continue
            for axis, placement in spec.grad.items():
                group: Group = getattr(groups, axis)
                if isinstance(placement, Partial) and group.size > 1:
                    yield axis, _PartialSum(gradient, *distinct_shard(spec, axis, group))


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    main_grad = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main_grad is None else main_grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _all_reduce(sums: list[_PartialSum], group: Group) -> None:
    """One collective for all small gradients, one for each large one.

    Ranks that hold different shards take part in the same collective with zeros in each other's places.
    """
    packed = []
    for item in sums:
        if item.num_shards == 1 and item.gradient.numel() >= _LARGE and item.gradient.is_contiguous():
            dist.all_reduce(item.gradient, group=group.handle)
        else:
            packed.append(item)
    if not packed:
        return
    sizes = [item.gradient.numel() * item.num_shards for item in packed]
    flat = packed[0].gradient.new_zeros(sum(sizes))
    places = [
        part.view(item.num_shards, -1)[item.shard].view(item.gradient.shape)
        for item, part in zip(packed, flat.split(sizes))
    ]
    gradients = [item.gradient for item in packed]
    torch._foreach_copy_(places, gradients)
    dist.all_reduce(flat, group=group.handle)
    torch._foreach_copy_(gradients, places)
