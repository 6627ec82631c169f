"""How one gradient bucket is summed over its ranks: all of it everywhere, or each rank's shard of it.

A *reduction* is a function that starts the collective and returns what finishes it. The sum over the copies of a
sharded optimizer state (--num-distributed-optimizer-instances) comes after, over shards alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.collective_names import reduce_scatter
from megatron.core.groups.process_groups import Group

Finish = Callable[[], None]
Reduction = Callable[[Tensor, Group], Finish]


def shard_of(data: Tensor, group: Group) -> Tensor:
    """The stretch of a flat bucket that belongs to this rank."""
    length = data.numel() // group.size
    return data[group.rank * length : (group.rank + 1) * length]


def all_reduce(data: Tensor, group: Group) -> Finish:
    """Every rank gets the whole sum."""
    return waiting_for(dist.all_reduce(data, group=group.handle, async_op=True))


def reduce_scatter_in_place(data: Tensor, group: Group) -> Finish:
    """Every rank gets the sum of its own shard, in place; the rest of ``data`` is undefined."""
    return waiting_for(reduce_scatter(shard_of(data, group), data, group=group.handle, async_op=True))


def reduce_scatter_accumulating_in_fp32(data: Tensor, group: Group) -> Finish:
    """The same for half precision: elements travel as they are and are added up in fp32, then rounded once."""
    received = torch.empty_like(data)
    wait = waiting_for(dist.all_to_all_single(received, data, group=group.handle, async_op=True))

    def finish() -> None:
        wait()
        shard_of(data, group).copy_(received.view(group.size, -1).sum(dim=0, dtype=torch.float32))

    return finish


def waiting_for(work: dist.Work | None) -> Finish:
    """What waits for a collective; on CUDA the current stream does, not the host."""
    assert work is not None, "this rank is not in the group"

    def finish() -> None:
        work.wait()

    return finish
