"""Communication of context parallelism: the step of a ring, and heads for sequence.

Legend: s sequence (local), b batch, a heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel import zigzag
from megatron.core.process_groups import Group

Arrange = Callable[[Sequence[Tensor]], Tensor]


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


class _Exchange:
    """An all-to-all under way. ``outgoing`` [n, ...]: a part for each rank; ``arrange`` makes the result of the parts
    that came."""

    def __init__(self, outgoing: Tensor, group: Group, arrange: Arrange) -> None:
        self._outgoing, self._arrange = outgoing, arrange
        self._incoming = torch.empty_like(outgoing)
        self._work = dist.all_to_all_single(self._incoming, outgoing, group=group.handle, async_op=True)

    def finish(self) -> Tensor:
        self._work.wait()
        return self._arrange(self._incoming.unbind())


def _heads_for_sequence(x: Tensor, group: Group) -> _Exchange:
    """Start [s, b, a, d] -> [s * n, b, a / n, d]: this rank's share of the heads of all ranks' tokens, in ascending
    order."""
    return _Exchange(torch.stack(x.chunk(group.size, dim=2)), group, partial(zigzag.whole, dim=0))


def _sequence_for_heads(x: Tensor, group: Group) -> _Exchange:
    """Start the inverse."""
    outgoing = torch.stack([zigzag.local_part(x, rank, group.size, dim=0) for rank in range(group.size)])
    return _Exchange(outgoing, group, partial(torch.cat, dim=2))


class _HeadsAndSequence(torch.autograd.Function):
    """One direction in forward, the other in backward; what is copied locally for one tensor runs beside the transfer
    of another."""

    @staticmethod
    def forward(ctx: Any, group: Group, scatter: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.scatter = group, scatter
        return _exchange_all(tensors, group, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *_exchange_all(grads, ctx.group, not ctx.scatter)


def _exchange_all(tensors: Sequence[Tensor], group: Group, scatter: bool) -> tuple[Tensor, ...]:
    start = _heads_for_sequence if scatter else _sequence_for_heads
    under_way = [start(x, group) for x in tensors]
    return tuple(each.finish() for each in under_way)


def scatter_heads(tensors: Sequence[Tensor], group: Group) -> Sequence[Tensor]:
    """Of each tensor, local tokens and all heads -> all tokens of the group and this rank's heads. The identity on one
    rank."""
    return tensors if group.size == 1 else _HeadsAndSequence.apply(group, True, *tensors)


def gather_heads(x: Tensor, group: Group) -> Tensor:
    """The inverse of :func:`scatter_heads`, of one tensor."""
    return x if group.size == 1 else _HeadsAndSequence.apply(group, False, x)[0]
