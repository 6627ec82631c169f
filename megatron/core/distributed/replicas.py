"""Finds copies of weights and optimizer state that should be equal and are not. Replicas drift apart without any
visible error (a gradient that nobody sums, a faulty device), so a run compares hashes from time to time.

Which ranks hold copies follows from placements: the data- and context-parallel ranks (those of other instances, where
each has a shard of its own), tensor-parallel ranks that hold the same shard, and the stages that hold a tied weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.exchange import all_gather_json
from megatron.core.distributed.data_parallel import DataParallel, unwrapped
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.sharding.flat_pieces import local_stretch
from megatron.core.sharding.placement import ParameterSpec, distinct_shard, global_name

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HASHED_AT_ONCE = 1 << 24  # elements: a hash needs 24 bytes beside each, which a GPU that is nearly full lacks


class Replica(NamedTuple):
    """A tensor of this rank that other ranks hold copies of."""

    name: str
    """What to call it; begins or ends with the parameter's name."""
    tensor: Tensor
    spec: ParameterSpec | None
    sharded: bool
    """Whether data-parallel ranks of one instance hold different parts of it."""


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


def weights_of(module: nn.Module) -> Iterator[Replica]:
    """Every parameter of a model chunk, wrapped for data parallelism or not."""
    if isinstance(module, DataParallel):
        module.finish_param_sync()
    for name, parameter in unwrapped(module).named_parameters():
        local, _, _ = local_stretch(parameter)
        yield Replica(name, local, getattr(parameter, "spec", None), isinstance(parameter, DTensor))


def check_replicas(
    modules: Sequence[nn.Module], groups: ProcessGroups, further: Iterable[Replica] = ()
) -> list[Difference]:  # fmt: skip
    """Every copy that differs, bit for bit, from that of the first rank of its group; empty if all is well.

    Collective over the world. Each rank returns what its own groups found; a difference is known to every rank of the
    group in which it is, under the same name.

    Args:
        modules: this rank's model chunks.
        groups: this rank's process groups.
        further: other replicated tensors, such as ``MegatronOptimizer.replicas()``.
    """
    replicas = [replica for module in modules for replica in weights_of(module)] + list(further)
    hashes = torch.stack([tensor_hash(replica.tensor) for replica in replicas]).tolist() if replicas else []
    hashed = list(zip(replicas, hashes))
    whole = {replica.name: value for replica, value in hashed if not replica.sharded}
    parts = {replica.name: value for replica, value in hashed if replica.sharded}
    found = _compare(whole, groups.dp_cp) + _compare(parts, groups.dp_cp_replica)
    found += _compare({_tensor_parallel_key(replica, groups.tp): value for replica, value in hashed}, groups.tp)
    found += _compare(_tied(hashed) if groups.embedding.size > 1 else {}, groups.embedding)
    return found


def _tensor_parallel_key(replica: Replica, group: Group) -> str:
    """Equal on ranks that hold the same shard."""
    shard, count = (0, 1) if replica.spec is None else distinct_shard(replica.spec, "tp", group)
    return replica.name if count == 1 else f"{replica.name} (shard {shard} of {count})"


def _tied(hashed: list[tuple[Replica, int]]) -> dict[str, int]:
    """What two pipeline stages may both hold goes by its global name; all else is of one stage."""
    return {_global_name(replica): value for replica, value in hashed}


def _global_name(replica: Replica) -> str:
    spec = replica.spec
    if spec is None or spec.tied_to is None:
        return replica.name
    prefix = replica.name.partition(":")[0] + ":" if ":" in replica.name else ""
    return prefix + global_name(replica.name, spec)


def _compare(mine: dict[str, int], group: Group) -> list[Difference]:
    """Values that differ from the first rank's that has the same key."""
    first: dict[str, int] = {}
    found = []
    for rank, entries in zip(group.ranks, all_gather_json(mine, group) if group.size > 1 else ()):
        for name, value in entries.items():
            if first.setdefault(name, value) != value:
                found.append(Difference(name, rank, group.name))
    return found
