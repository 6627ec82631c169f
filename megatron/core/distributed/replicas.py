"""Consistency check of replicated weights and optimizer state, by comparing hashes between ranks.

Replicas can diverge without a visible error (a missing gradient reduction, a faulty device), so a run compares them
periodically. Placements determine the replicas: ranks that hold the same rectangle of a global tensor must hold
bit-identical values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.exchange import all_gather_json
from megatron.core.distributed.data_parallel import DataParallel, unwrapped
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.sharding.named_slices import stored_parameters
from megatron.core.sharding.sharded_tensor import ShardedTensor, stored_tensors

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 1 << 14
_HASHED_AT_ONCE = 1 << 24  # elements per chunk: temporaries take 24 bytes per element and would not fit on a full GPU


_AXES = ("dp_cp", "tp", "edp", "ep", "etp", "embedding")
"""Axes to compare over. Any two ranks with the same rectangle are connected by steps along these axes."""


class ReplicaDifference(NamedTuple):
    """A replica that differs from the replica of the first rank in its group."""

    name: str
    """Global tensor name."""
    rank: int
    """Global rank of the differing replica."""
    axis: str
    """Axis of ``ProcessGroups`` over which the tensor should be equal."""


def tensor_hash(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a 64-bit, position-dependent hash of the bits of ``tensor``, int64 on ``device``. No host sync. Sum modulo
    2^64 of each element's bits plus one, times an odd weight: a change of a single element changes the hash."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER[tensor.element_size()])
    device = device or bits.device
    if bits.numel() <= _SMALL:  # most tensors of a small model
        return ((bits.to(device, torch.int64) + 1) * _small_weights(device)[: bits.numel()]).sum()
    total = torch.zeros((), dtype=torch.int64, device=device)
    for first in range(0, bits.numel(), _HASHED_AT_ONCE):
        some = bits[first : first + _HASHED_AT_ONCE].to(device).to(torch.int64)
        total += ((some + 1) * _weights(first, first + some.numel(), device)).sum()
    return total


def _weights(first: int, end: int, device: torch.device) -> Tensor:
    return torch.arange(first, end, device=device) * 2 * 0x9E3779B97F4A7C1 + 1


@functools.cache
def _small_weights(device: torch.device) -> Tensor:
    return _weights(0, _SMALL, device)


def weight_rectangles(module: nn.Module, groups: ProcessGroups) -> Iterator[ShardedTensor]:
    """Yield every parameter of a model chunk as rectangles; waits for weight all-gathers of a data-parallel wrapper."""
    if isinstance(module, DataParallel):
        module.gather_exact_weights()
    for name, parameter in stored_parameters(unwrapped(module)):
        yield from stored_tensors(name, parameter, groups=groups).values()


def check_replicas(
    modules: Sequence[nn.Module], groups: ProcessGroups, additional: Iterable[ShardedTensor] = ()
) -> list[ReplicaDifference]:
    """Return the replicas (of weights and ``additional`` tensors, such as ``MegatronOptimizer.replicas()``) that are
    not bit-identical to the copy of their group's first rank. Collective over all ranks; waits for the device. All
    ranks of a group return the same entries for it."""
    tensors = [tensor for module in modules for tensor in weight_rectangles(module, groups)] + list(additional)
    device = tensors[0].local.device if tensors else None  # a weight; offloaded state is hashed there too
    hashes = torch.stack([tensor_hash(tensor.local, device) for tensor in tensors]).tolist() if tensors else []
    mine = [[tensor.name, list(tensor.rectangle.offsets), list(tensor.rectangle.lengths), value]
            for tensor, value in zip(tensors, hashes)]  # fmt: skip
    joined: dict[tuple[int, ...], Group] = {}
    for axis in _AXES:
        group: Group = getattr(groups, axis)
        if group.size > 1:
            joined.setdefault(group.ranks, group)
    return [difference for group in joined.values() for difference in _compare(mine, group)]


def _compare(mine: list[list[Any]], group: Group) -> list[ReplicaDifference]:
    """Entries: (name, offsets, lengths, hash). Return one difference per entry whose hash differs from the first rank
    with that rectangle; the same list on every rank."""
    first: dict[tuple, int] = {}
    differences = []
    for rank, entries in zip(group.ranks, all_gather_json(mine, group)):
        for name, offsets, lengths, value in entries:
            if first.setdefault((name, *offsets, *lengths), value) != value:
                differences.append(ReplicaDifference(name, rank, group.name))
    return differences
