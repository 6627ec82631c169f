"""Communication of context parallelism: the step of a ring, and heads for sequence.

Legend: s sequence (local), b batch, a heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.context_parallel import zigzag
from megatron.core.groups.process_groups import Group


class NeighbourExchange:
    """A tensor on its way to the next rank of a ring, and its twin from the previous one."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[dist.Work]) -> None:
        # ``sent`` is kept: its memory must outlive the send
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """Return what the previous rank sent; on CUDA in stream order."""
        for work in self._works:
            work.wait()
        return self._received


def neighbour_exchange(x: Tensor, group: Group, tag: int = 0) -> NeighbourExchange:
    """Start sending ``x`` (contiguous) to the next rank of ``group`` and receiving as much from the previous one."""
    received = torch.empty_like(x)
    following, previous = group.ranks[(group.rank + 1) % group.size], group.ranks[group.rank - 1]
    # in one batch: over NCCL a send alone waits for its receive, and round a ring every rank would wait for the next
    operations = [
        dist.P2POp(dist.isend, x, following, group.handle, tag),
        dist.P2POp(dist.irecv, received, previous, group.handle, tag),
    ]
    return NeighbourExchange(x, received, dist.batch_isend_irecv(operations))


def _all_to_all(tensors: Sequence[Tensor], group: Group, scatter: bool) -> tuple[Tensor, ...]:
    """One collective for all tensors, which are packed per receiving rank: [n, elements]."""
    pack, unpack = (_shares_of_heads, _whole_sequence) if scatter else (_shares_of_sequence, _all_heads)
    outgoing = pack(tensors, group.size)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group.handle)
    came = incoming.split([x.numel() // group.size for x in tensors], dim=1)
    shapes = (_shape_of_part(x, group.size, scatter) for x in tensors)
    return tuple(unpack(parts.view(group.size, *shape)) for parts, shape in zip(came, shapes))


def _shape_of_part(x: Tensor, size: int, scatter: bool) -> tuple[int, ...]:
    """Shape of what each rank sends of its tensor ``x``: fewer heads of its tokens, or fewer tokens of its heads."""
    s, b, a, d = x.shape
    return (s, b, a // size, d) if scatter else (s // size, b, a, d)


def _shares_of_heads(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Packs the part of each [s, b, a, d] that every rank gets: its heads."""
    outgoing = tensors[0].new_empty((size, sum(x.numel() for x in tensors) // size))
    slots = outgoing.split([x.numel() // size for x in tensors], dim=1)
    for x, slot in zip(tensors, slots):
        by_rank = x.unflatten(2, (size, -1)).movedim(2, 0)
        _copy(slot.view(by_rank.shape), by_rank)
    return outgoing


def _shares_of_sequence(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Packs the part of each [s, b, a, d] that every rank gets: its tokens."""
    pieces = [
        x[start:stop].flatten()
        for rank in range(size) for x in tensors for start, stop in zigzag.spans(len(x), rank, size)
    ]  # fmt: skip
    return torch.cat(pieces).view(size, -1)


def _whole_sequence(parts: Tensor) -> Tensor:
    """[n, s / n, b, a, d] of all ranks -> [s, b, a, d], tokens in ascending order."""
    return zigzag.whole(parts.unbind(), dim=0)


def _all_heads(parts: Tensor) -> Tensor:
    """[n, s, b, a / n, d] of all ranks -> [s, b, a, d]."""
    size, s, b, share, d = parts.shape
    result = parts.new_empty((s, b, size, share, d))
    _copy(result.movedim(2, 0), parts)
    return result.flatten(2, 3)


_WIDE = torch.complex128
"""Sixteen bytes."""


def _copy(target: Tensor, source: Tensor) -> None:
    """``source`` to ``target``, both contiguous in their last dim; on GPUs torch moves strided tensors element by
    element, hence in the largest elements there are."""
    size = _WIDE.itemsize // source.element_size()
    both = (target, source)
    multiples = (source.shape[-1], *(n for x in both for n in (x.storage_offset(), *x.stride()[:-1])))
    if all(x.stride(-1) == 1 for x in both) and not any(n % size for n in multiples):
        target, source = (x.view(_WIDE) for x in both)
    target.copy_(source)


class _HeadsAndSequence(torch.autograd.Function):
    """One direction in forward, the other in backward."""

    @staticmethod
    def forward(ctx: Any, group: Group, scatter: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.scatter = group, scatter
        return _all_to_all(tensors, group, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *_all_to_all(grads, ctx.group, not ctx.scatter)


def scatter_heads(tensors: Sequence[Tensor], group: Group) -> Sequence[Tensor]:
    """For each tensor, local tokens and all heads -> all tokens of the group and this rank's heads. The identity on one
    rank."""
    return tensors if group.size == 1 else _HeadsAndSequence.apply(group, True, *tensors)


def gather_heads(x: Tensor, group: Group) -> Tensor:
    """The inverse of :func:`scatter_heads`, of one tensor."""
    return x if group.size == 1 else _HeadsAndSequence.apply(group, False, x)[0]
