"""Reductions of one gradient bucket over its ranks: all of it everywhere, or each rank's shard of it.

A *reduction* is a function that starts the collective and returns its handle. The sum over the copies of a sharded
optimizer state (--num-distributed-optimizer-instances) comes after, over shards alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.collective_names import reduce_scatter
from megatron.core.groups.process_groups import Group

Reduction = Callable[[Tensor, Group], AsyncHandle]


def shard_of(data: Tensor, group: Group) -> Tensor:
    """The stretch of a flat bucket that belongs to this rank."""
    length = data.numel() // group.size
    return data[group.rank * length : (group.rank + 1) * length]


def all_reduce(data: Tensor, group: Group) -> AsyncHandle:
    """Every rank gets the whole sum."""
    return _started(dist.all_reduce(data, group=group.handle, async_op=True))


def reduce_scatter_in_place(data: Tensor, group: Group) -> AsyncHandle:
    """Every rank gets the sum of its own shard, in place; the rest of ``data`` is undefined."""
    return _started(reduce_scatter(shard_of(data, group), data, group=group.handle, async_op=True))


class _RoundedOnce:
    """The parts of all ranks for one shard, on their way; added up in fp32 at the end."""

    def __init__(self, data: Tensor, group: Group) -> None:
        self._shard, self._received = shard_of(data, group), torch.empty_like(data).view(group.size, -1)
        self._exchange = _started(
            dist.all_to_all_single(self._received.view(-1), data, group=group.handle, async_op=True)
        )

    def wait(self) -> None:
        self._exchange.wait()
        self._shard.copy_(self._received.sum(dim=0, dtype=torch.float32))


def reduce_scatter_accumulating_in_fp32(data: Tensor, group: Group) -> AsyncHandle:
    """The same for half precision: elements travel as they are and are added up in fp32, then rounded once."""
    return _RoundedOnce(data, group)


def _started(work: dist.Work | None) -> AsyncHandle:
    assert work is not None, "this rank is not in the group"
    return work
