"""All-reduce of partial gradients over the ranks that hold the same elements of a parameter.

The placement (``spec.grad``) determines which gradients are partial: norms and output biases with sequence parallelism,
q/k norms, K/V heads replicated over tensor-parallel ranks, and copies of tied embeddings. No list of names is kept.

The all-reduce runs after the data-parallel reduction. Sums over different axes commute, so the order changes the result
by rounding only. This order works with every data-parallel reduction: a bucket can start as soon as its last gradient
is ready, which a preceding sum would prevent. With reduce-scattered buckets the valid shard of ``main_grad`` covers the
same elements on all ranks of the axis, because their buffers have equal layouts; the elements outside the shard are
summed too, but never read. The volume is a few vectors per layer."""

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
"""Minimum elements for an all-reduce in place; smaller gradients are packed into one message."""


class _PartialSum(NamedTuple):
    gradient: Tensor
    shard: int
    """Index among the ``num_shards`` different shards along the axis."""
    num_shards: int


@torch.no_grad()
def sum_partial_gradients(modules: Iterable[nn.Module], groups: ProcessGroups) -> None:
    """All-reduce (sum) the partial gradients of ``modules`` (this rank's chunks) in place. Uses ``main_grad`` if it
    exists, else ``grad``; skips parameters without gradient or spec. Collective over every axis in a ``spec.grad``: all
    ranks of such an axis must hold the same parameters with partial gradients over it, in the same order."""
    waiting: dict[tuple[str, torch.dtype], list[_PartialSum]] = {}
    for axis, partial_sum in _partial_sums(modules, groups):
        waiting.setdefault((axis, partial_sum.gradient.dtype), []).append(partial_sum)
    for (axis, _), sums in waiting.items():
        _all_reduce(sums, getattr(groups, axis))


def _partial_sums(modules: Iterable[nn.Module], groups: ProcessGroups) -> Iterator[tuple[str, _PartialSum]]:
    """Yield (axis, gradient with its shard index) over axes of several ranks; of a parameter maybe several."""
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
    """One collective per large gradient and one for all others, packed. With several shards along the axis each rank
    fills its slot of a buffer and leaves zeros in the others, so that the sum mixes no shards."""
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
