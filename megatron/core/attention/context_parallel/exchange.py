"""Context-parallel communication: the p2p step of a ring, and all-to-all between sequence and head sharding.

Legend: s sequence (local), b batch, a heads, d head dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.context_parallel.zigzag import Order
from megatron.core.autograd_context import AutogradContext
from megatron.core.groups.process_groups import Group


class NeighbourExchange:
    """An exchange in flight: a send to the next rank of a ring and a receive from the previous rank."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[dist.Work]) -> None:
        # keep a reference to ``sent``: its memory must not be reused before the send has finished
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """Wait for both and return the previous rank's tensor. With NCCL the current stream waits, else the host."""
        for work in self._works:
            work.wait()
        return self._received


def neighbour_exchange(x: Tensor, group: Group, tag: int = 0) -> NeighbourExchange:
    """Start sending ``x`` (contiguous) to the next rank of ``group`` and receiving its shape from the previous one.
    Every rank of ``group`` must call it. ``x`` must not change before ``wait``. ``tag`` distinguishes exchanges in
    flight at the same time (gloo; NCCL matches them by order)."""
    received = torch.empty_like(x)
    next_rank, previous_rank = group.ranks[(group.rank + 1) % group.size], group.ranks[group.rank - 1]
    # one batch: an unbatched NCCL send waits for its receive, so that all ranks of the ring would deadlock
    operations = [
        dist.P2POp(dist.isend, x, next_rank, group.handle, tag),
        dist.P2POp(dist.irecv, received, previous_rank, group.handle, tag),
    ]
    return NeighbourExchange(x, received, dist.batch_isend_irecv(operations))


def _all_to_all(tensors: Sequence[Tensor], group: Group, order: Order, scatter: bool) -> tuple[Tensor, ...]:
    """Exchange heads for sequence (``scatter``) or back, for all tensors in one all-to-all over ``group``; return new
    tensors in their order. Each [s, b, a, d] is packed per receiving rank into a buffer [n, elements]: one message per
    pair of ranks. With NCCL the current stream waits, with gloo the host; no autograd."""
    outgoing = _head_shares(tensors, group.size) if scatter else _sequence_shares(tensors, group.size, order)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group.handle)
    came = incoming.split([x.numel() // group.size for x in tensors], dim=1)
    shapes = (_part_shape(x, group.size, scatter) for x in tensors)
    parts = (part.view(group.size, *shape) for part, shape in zip(came, shapes))
    return tuple(zigzag.merge_parts(part.unbind(), 0, order) if scatter else _all_heads(part) for part in parts)


def _part_shape(x: Tensor, size: int, scatter: bool) -> tuple[int, ...]:
    """Return the shape of the shard of ``x`` that goes to one rank: a / n heads (``scatter``) or s / n tokens."""
    s, b, a, d = x.shape
    return (s, b, a // size, d) if scatter else (s // size, b, a, d)


def _head_shares(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Copy each of ``tensors`` [s, b, a, d] into one buffer [n, elements], where row r holds the heads a / n of rank r
    of all tensors, one after the other. n is ``size``; it must divide all a."""
    outgoing = tensors[0].new_empty((size, sum(x.numel() for x in tensors) // size))
    slots = outgoing.split([x.numel() // size for x in tensors], dim=1)
    for x, slot in zip(tensors, slots):
        by_rank = x.unflatten(2, (size, -1)).movedim(2, 0)
        _copy(slot.view(by_rank.shape), by_rank)
    return outgoing


def _sequence_shares(tensors: Sequence[Tensor], size: int, order: Order) -> Tensor:
    """Copy each of ``tensors`` [s, b, a, d] (full sequences) into one buffer [n, elements], where row r holds the
    tokens of rank r of all tensors, one after the other. UserError if the ranks cannot split s."""
    pieces = [
        x[start:stop].flatten()
        for rank in range(size)
        for x in tensors
        for start, stop in zigzag.spans(len(x), rank, size, order)
    ]
    return torch.cat(pieces).view(size, -1)


def _all_heads(parts: Tensor) -> Tensor:
    """Merge the head shards [n, s, b, a / n, d] of all ranks into [s, b, a, d]."""
    size, s, b, share, d = parts.shape
    result = parts.new_empty((s, b, size, share, d))
    _copy(result.movedim(2, 0), parts)
    return result.flatten(2, 3)


_WIDE = torch.complex128
"""A dtype of 16 bytes, the widest."""


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``target`` in place, as 16-byte elements if strides and offsets allow. On GPUs torch copies
    strided tensors element by element, so that wider elements are faster."""
    size = _WIDE.itemsize // source.element_size()
    both = (target, source)
    multiples = (source.shape[-1], *(n for x in both for n in (x.storage_offset(), *x.stride()[:-1])))
    if all(x.stride(-1) == 1 for x in both) and not any(n % size for n in multiples):
        target, source = (x.view(_WIDE) for x in both)
    target.copy_(source)


class HeadsAndSequence(torch.autograd.Function):
    """All-to-all between sequence and head sharding over the n ranks of ``group``, for all tensors in one collective;
    the inverse all-to-all of the gradients in backward. ``scatter``: this rank's tokens in ``order`` [s, b, a, d] ->
    [n * s, b, a / n, d] in natural order; else back. n must divide a; UserError if the ranks cannot split s."""

    @staticmethod
    def forward(
        ctx: AutogradContext, group: Group, order: Order, scatter: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.order, ctx.scatter = group, order, scatter
        return _all_to_all(tensors, group, order, scatter)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[object, ...]:  # type: ignore[override]
        return None, None, None, *_all_to_all(grads, ctx.group, ctx.order, not ctx.scatter)
