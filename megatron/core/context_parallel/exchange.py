"""The step of a ring: a tensor goes to the next rank while its twin comes from the previous one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.process_groups import Group


class NeighbourExchange:
    """A tensor on its way to the next rank of a ring, and its twin from the previous one."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[dist.Work]) -> None:
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """What the previous rank sent; on CUDA in stream order."""
        for work in self._works:
            work.wait()
        return self._received


def neighbour_exchange(x: Tensor, group: Group, tag: int = 0) -> NeighbourExchange:
    """Start sending ``x`` (contiguous) to the next rank of ``group`` and receiving as much from the previous one."""
    received = torch.empty_like(x)
    following, previous = group.ranks[(group.rank + 1) % group.size], group.ranks[group.rank - 1]
    operations = [
        dist.P2POp(dist.isend, x, following, group.handle, tag),
        dist.P2POp(dist.irecv, received, previous, group.handle, tag),
    ]
    return NeighbourExchange(x, received, dist.batch_isend_irecv(operations))
