"""Communication of context parallelism: the step of a ring, and heads for sequence.

Legend: s sequence (local), b batch, a heads, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel import zigzag
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


def _heads_for_sequence(x: Tensor, group: Group) -> Tensor:
    """[s, b, a, d] -> [s * n, b, a / n, d]: this rank's share of the heads of all ranks' tokens, in ascending order."""
    outgoing = torch.stack(x.chunk(group.size, dim=2))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group.handle)
    return zigzag.whole(incoming.unbind(), dim=0)


def _sequence_for_heads(x: Tensor, group: Group) -> Tensor:
    """The inverse."""
    outgoing = torch.stack([zigzag.local_part(x, rank, group.size, dim=0) for rank in range(group.size)])
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group.handle)
    return torch.cat(incoming.unbind(), dim=2)


class _Exchange(torch.autograd.Function):
    """One direction in forward, the other in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, scatter: bool) -> Tensor:
        ctx.group, ctx.scatter = group, scatter
        return _heads_for_sequence(x, group) if scatter else _sequence_for_heads(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inverse = _sequence_for_heads if ctx.scatter else _heads_for_sequence
        return inverse(grad, ctx.group), None, None


def scatter_heads(x: Tensor, group: Group) -> Tensor:
    """Local tokens and all heads -> all tokens of the group and this rank's heads. The identity on one rank."""
    return x if group.size == 1 else _Exchange.apply(x, group, True)


def gather_heads(x: Tensor, group: Group) -> Tensor:
    """The inverse of :func:`scatter_heads`."""
    return x if group.size == 1 else _Exchange.apply(x, group, False)
