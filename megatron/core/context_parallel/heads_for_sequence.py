"""Heads for sequence and back: the exchanges around the attention of an all-to-all, each with one copy.

Whole sequences are received chunk by chunk into their places, and sent from there: zig-zag order costs nothing. What is
copied is the side of the local tokens, whose heads go to several ranks: packed before it is sent, unpacked after it has
come. Queries, keys and values go in one batch of sends and receives.

An exchange is two autograd nodes, one that starts it and one that waits. Backward, the second starts the reverse and
the first waits, so that whatever is between them, in either direction, runs beside the transfer:

    _SendHeads  .. _HeadsHere     local query, key, value  ->  whole sequences of this rank's heads
    _SendSequence .. _SequenceHere    attention output     ->  all heads of local tokens

Legend: s sequence (local), c chunk (s / 2), b batch, n ranks, h heads of a rank (of one part), a = n parts h all heads,
d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.process_groups import Group


class _Transfer:
    """Tensors on their way; what is sent lives until it has arrived."""

    def __init__(self, sent: Sequence[Tensor], received: Sequence[Tensor], works: Sequence[dist.Work]) -> None:
        self.sent, self.received, self._works = sent, received, works

    def wait(self) -> None:
        """On CUDA in stream order."""
        for work in self._works:
            work.wait()


class _Passage:
    """What the nodes of one attention share: the group, and the transfers between a node that starts and its twin."""

    def __init__(self, group: Group, parts: int) -> None:
        self.group, self.parts = group, parts
        self.transfers: dict[tuple[str, int], _Transfer] = {}

    def share(self, x: Tensor, part: int) -> Tensor:
        """A view [s, b, n, h, d] of [s, b, a, d]: what each rank has of one part."""
        return x.unflatten(2, (self.group.size, self.parts, -1))[:, :, :, part]


def copy_wide(destination: Tensor, source: Tensor) -> None:
    """``copy_``, eight bytes at a time where strides allow: torch's strided copies move an element per load."""
    pair = destination, source
    width = 8 // source.element_size()
    if width > 1 and all(
        x.stride(-1) == 1 and not any(n % width for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in pair
    ):
        destination, source = (x.view(torch.int64) for x in pair)
    destination.copy_(source)


def _others(group: Group) -> tuple[slice, ...]:
    """The ranks before this one and those after it."""
    return tuple(each for each in (slice(0, group.rank), slice(group.rank + 1, group.size)) if each.stop > each.start)


def _chunks_of(whole: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Rank ``rank``'s early and late chunk [c, ...] of whole sequences [s n, ...]: views."""
    chunks = whole.chunk(2 * size)
    return chunks[rank], chunks[2 * size - 1 - rank]


def _operations(whole: Tensor, local: Tensor, group: Group, tag: int, *, sends_whole: bool) -> list[dist.P2POp]:
    """Chunks of ``whole`` [s n, b, h, d] against this rank's own in ``local`` [n, s, b, h, d], slot by slot.

    Sends come in pairs with receives of the same size.
    """
    operations = []
    for step in range(1, group.size):
        peer = (group.rank + step) % group.size
        # with a whole sequence, a peer's chunks belong to the peer; in a slot, they are this rank's
        pairs = zip(_chunks_of(whole, peer, group.size), local[peer].chunk(2), strict=True)
        for half, (of_whole, of_local) in enumerate(pairs):
            sent, received = (of_whole, of_local) if sends_whole else (of_local, of_whole)
            for act, x in ((dist.isend, sent), (dist.irecv, received)):
                operations.append(dist.P2POp(act, x, group.ranks[peer], group.handle, 2 * tag + half))
    return operations


def _send_heads(local: Sequence[Tensor], group: Group) -> _Transfer:
    """[s, b, n, h, d] of any strides -> [s n, b, h, d], on their way: this rank's heads of all ranks' tokens."""
    packed: list[Tensor] = []
    wholes: list[Tensor] = []
    operations: list[dist.P2POp] = []
    for x in local:
        length, batch, size, heads, channels = x.shape
        outgoing = x.new_empty(size, length, batch, heads, channels)
        whole = x.new_empty(size * length, batch, heads, channels)
        for ranks in _others(group):
            copy_wide(outgoing[ranks], x[:, :, ranks].movedim(2, 0))
        for place, chunk in zip(_chunks_of(whole, group.rank, size), x[:, :, group.rank].chunk(2), strict=True):
            copy_wide(place, chunk)
        operations += _operations(whole, outgoing, group, len(wholes), sends_whole=False)
        packed.append(outgoing)
        wholes.append(whole)
    return _Transfer(packed, wholes, dist.batch_isend_irecv(operations))


def _send_sequence(wholes: Sequence[Tensor], group: Group) -> _Transfer:
    """[s n, b, h, d] -> [n, s, b, h, d], on their way: the local tokens' heads, by the rank that had them."""
    sent: list[Tensor] = []
    slots: list[Tensor] = []
    operations: list[dist.P2POp] = []
    for x in wholes:
        whole = x.contiguous()
        incoming = whole.new_empty(group.size, len(whole) // group.size, *whole.shape[1:])
        operations += _operations(whole, incoming, group, len(slots), sends_whole=True)
        sent.append(whole)
        slots.append(incoming)
    return _Transfer(sent, slots, dist.batch_isend_irecv(operations))


def _unpack(transfer: _Transfer, local: Sequence[Tensor], group: Group) -> None:
    """What :func:`_send_sequence` sent, into views [s, b, n, h, d]; this rank's own heads never left it."""
    transfer.wait()
    for whole, incoming, x in zip(transfer.sent, transfer.received, local, strict=True):
        for ranks in _others(group):
            copy_wide(x[:, :, ranks], incoming[ranks].movedim(0, 2))
        for place, chunk in zip(x[:, :, group.rank].chunk(2), _chunks_of(whole, group.rank, group.size), strict=True):
            copy_wide(place, chunk)


def _flat(transfer: _Transfer) -> tuple[Tensor, ...]:
    """Slots [n, s, ...] in the shape [n s, ...] of whole sequences, as autograd knows them: not in that order."""
    return tuple(x.flatten(0, 1) for x in transfer.received)


class _SendHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: _Passage, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.passage, ctx.shapes = passage, [x.shape for x in local]
        wholes: list[Tensor] = []
        for part in range(passage.parts):
            transfer = _send_heads([passage.share(x, part) for x in local], passage.group)
            passage.transfers["heads", part] = transfer
            wholes += transfer.received
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        passage: _Passage = ctx.passage
        results = [grads[0].new_empty(shape) for shape in ctx.shapes]
        for part in range(passage.parts):
            shares = [passage.share(x, part) for x in results]
            _unpack(passage.transfers.pop(("heads", part)), shares, passage.group)
        return None, *results


class _HeadsHere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: _Passage, part: int, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.passage, ctx.part = passage, part
        passage.transfers.pop(("heads", part)).wait()
        return wholes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        transfer = _send_sequence(grads, ctx.passage.group)
        ctx.passage.transfers["heads", ctx.part] = transfer
        return None, None, *_flat(transfer)


class _SendSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: _Passage, part: int, whole: Tensor) -> Tensor:
        ctx.passage, ctx.part = passage, part
        transfer = _send_sequence([whole], passage.group)
        passage.transfers["sequence", part] = transfer
        return _flat(transfer)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.passage.transfers.pop(("sequence", ctx.part)).wait()
        return None, None, grad


class _SequenceHere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: _Passage, *slots: Tensor) -> Tensor:
        ctx.passage = passage
        length, batch, heads, channels = slots[0].shape
        size = passage.group.size
        result = slots[0].new_empty(length // size, batch, size * len(slots) * heads, channels)
        for part in range(len(slots)):
            transfer = passage.transfers.pop(("sequence", part))
            _unpack(transfer, [passage.share(result, part)], passage.group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        passage: _Passage = ctx.passage
        wholes: dict[int, Tensor] = {}
        for part in reversed(range(passage.parts)):  # the last part's backward runs first
            transfer = _send_heads([passage.share(grad, part)], passage.group)
            passage.transfers["sequence", part] = transfer
            wholes[part] = transfer.received[0]
        return None, *(wholes[part] for part in range(passage.parts))


class HeadExchange:
    """The exchanges of one call of an attention, to be used in this order:

        exchange = HeadExchange(query, key, value, group, parts)        # starts all parts
        outs = [exchange.send(part, attend(*exchange.heads(part))) for part in range(parts)]
        out = exchange.receive(outs)

    One part's exchanges run beside the attention of the others. ``query`` [s, b, a, d], ``key`` and ``value``
    [s, b, g, d]: a and g are multiples of ``group.size * parts``. Attention sees [s n, b, heads, d].
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, group: Group, parts: int = 1) -> None:
        self._passage = _Passage(group, parts)
        self._wholes = _SendHeads.apply(self._passage, query, key, value)

    def heads(self, part: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of whole sequences in ascending order, once they are here."""
        return _HeadsHere.apply(self._passage, part, *self._wholes[3 * part : 3 * part + 3])

    def send(self, part: int, out: Tensor) -> Tensor:
        """Start the way back of a part's output [s n, b, h, d]; the result is for :meth:`receive` alone."""
        return _SendSequence.apply(self._passage, part, out)

    def receive(self, outs: Sequence[Tensor]) -> Tensor:
        """The outputs of all parts: all heads of this rank's tokens [s, b, a, d]."""
        return _SequenceHere.apply(self._passage, *outs)
