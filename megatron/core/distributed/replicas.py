"""Finds copies of weights and optimizer state that should be equal and are not. Replicas drift apart without any
visible error (a gradient that nobody sums, a faulty device), so a run compares hashes from time to time.

Which ranks hold copies follows from placements: two ranks that hold the same rectangle of a global tensor must hold the
same bits of it, whatever axis they differ in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.exchange import all_gather_json
from megatron.core.distributed.data_parallel import DataParallel, unwrapped
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.sharding.sharded_tensor import ShardedTensor, stored_tensors

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HASHED_AT_ONCE = 1 << 24  # elements: a hash needs 24 bytes beside each, which a GPU that is nearly full lacks


_AXES = ("dp_cp", "tp", "edp", "ep", "etp", "embedding")
"""Two ranks with a copy of the same rectangle are joined by steps along these."""


class Difference(NamedTuple):
    """A copy that differs from the first rank's that holds it."""

    name: str
    rank: int
    """Global."""
    axis: str
    """Axis of ``ProcessGroups`` over whose ranks it should be equal."""


def tensor_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the bits of ``tensor`` in its order, as an int64 scalar on its device.

    A sum, modulo 2^64, of every element's bits times an odd weight of its position: one changed bit always changes it.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), _HASHED_AT_ONCE):
        some = bits[first : first + _HASHED_AT_ONCE].to(torch.int64)
        weights = torch.arange(first, first + some.numel(), device=bits.device) * 2 * 0x9E3779B97F4A7C1 + 1
        total += ((some + 1) * weights).sum()
    return total


def weights_of(module: nn.Module, groups: ProcessGroups) -> Iterator[ShardedTensor]:
    """Every parameter of a model chunk, wrapped for data parallelism or not."""
    if isinstance(module, DataParallel):
        module.finish_param_sync()
    for name, parameter in unwrapped(module).named_parameters():
        yield from stored_tensors(name, parameter, groups=groups).values()


def check_replicas(
    modules: Sequence[nn.Module], groups: ProcessGroups, further: Iterable[ShardedTensor] = ()
) -> list[Difference]:  # fmt: skip
    """Every copy that differs, bit for bit, from that of the first rank of its group; empty if all is well.

    Collective over the world. Each rank returns what its own groups found; a difference is known to every rank of the
    group in which it is, under the same name.

    Args:
        modules: this rank's model chunks.
        groups: this rank's process groups.
        further: other tensors, such as ``MegatronOptimizer.replicas()``.
    """
    held = [tensor for module in modules for tensor in weights_of(module, groups)] + list(further)
    hashes = torch.stack([tensor_hash(tensor.local) for tensor in held]).tolist() if held else []
    mine = [[tensor.name, list(tensor.rectangle.offsets), list(tensor.rectangle.lengths), value]
            for tensor, value in zip(held, hashes)]  # fmt: skip
    joined: dict[tuple[int, ...], Group] = {}
    for axis in _AXES:
        group: Group = getattr(groups, axis)
        if group.size > 1:
            joined.setdefault(group.ranks, group)
    return [difference for group in joined.values() for difference in _compare(mine, group)]


def _compare(mine: list[list[Any]], group: Group) -> list[Difference]:
    """Values that differ from that of the first rank that holds the same rectangle."""
    first: dict[tuple, int] = {}
    found = []
    for rank, entries in zip(group.ranks, all_gather_json(mine, group)):
        for name, offsets, lengths, value in entries:
            if first.setdefault((name, *offsets, *lengths), value) != value:
                found.append(Difference(name, rank, group.name))
    return found
