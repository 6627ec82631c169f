"""Reductions of a gradient bucket: all-reduce, or reduce-scatter into this rank's shard.

A ``Reduction`` starts the collective on a flat tensor, in place, and returns an :class:`AsyncHandle`. With several
optimizer instances (--num-distributed-optimizer-instances) the all-reduce of the shards over instances follows later.
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


def local_shard(data: Tensor, group: Group) -> Tensor:
    """Return this rank's shard of a flat bucket, a view of ``numel / group.size`` elements."""
    length = data.numel() // group.size
    return data[group.rank * length : (group.rank + 1) * length]


def all_reduce(data: Tensor, group: Group) -> AsyncHandle:
    """Start an in-place sum of ``data`` over ``group``, in its dtype; every rank gets the full sum."""
    return _started(dist.all_reduce(data, group=group.handle, async_op=True))


def reduce_scatter_in_place(data: Tensor, group: Group) -> AsyncHandle:
    """Start an in-place reduce-scatter: this rank's shard becomes the sum, the rest of ``data`` is undefined."""
    return _started(reduce_scatter(local_shard(data, group), data, group=group.handle, async_op=True))


class ReduceScatterInFp32:
    """Reduce-scatter in flight of half-precision ``data``, in place, that rounds once: an all-to-all exchanges the
    elements in half precision; ``wait`` sums them in fp32 and rounds the sum. Allocates as much as ``data``."""

    def __init__(self, data: Tensor, group: Group) -> None:
        self._shard, self._received = local_shard(data, group), torch.empty_like(data).view(group.size, -1)
        self._exchange = _started(
            dist.all_to_all_single(self._received.view(-1), data, group=group.handle, async_op=True)
        )

    def wait(self) -> None:
        self._exchange.wait()
        self._shard.copy_(self._received.sum(dim=0, dtype=torch.float32))


def _started(work: dist.Work | None) -> AsyncHandle:
    assert work is not None, "this rank is not in the group"
    return work
