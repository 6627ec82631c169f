"""Messages between neighbours of a ring of ranks, each in the order in which it was sent.

A sender writes into its neighbour's memory as soon as the slot is free, whether or not anybody asks; the receiver's
stream waits where it needs the message, copies it out and frees the slot. So nothing needs to be asked for in advance,
and a message that is awaited costs nothing but time.
"""

from __future__ import annotations

from torch import Tensor

from megatron.core.groups.copy_engines.window import SLOTS, OpenWindow

_FROM_PREVIOUS, _FROM_NEXT = 0, 1
_ARRIVED, _TAKEN = 0, 1


class Mailbox:
    """For messages of at most ``num_bytes`` each; opened by all ranks of the group together.

    Every rank receives in two lanes, each with a window of its own, so that a message which waits for a free slot holds
    up no other lane. Words: how many messages have arrived, and how many that this rank sent have been taken out.
    """

    def __init__(self, rank: int, size: int, num_bytes: int, open_window: OpenWindow) -> None:
        self._rank, self._size, self._num_bytes = rank, size, num_bytes
        self._lanes = [open_window(SLOTS * num_bytes, 2) for _ in (_FROM_PREVIOUS, _FROM_NEXT)]
        self._sent, self._received = [0, 0], [0, 0]
        """Messages so far, by the lane at the receiver."""

    def send(self, target: int, x: Tensor) -> None:
        """Start to send ``x``, contiguous, to a neighbour."""
        lane = self._lane(self._rank, target)
        window = self._lanes[lane]
        self._sent[lane] = number = self._sent[lane] + 1
        queue = window.beside()
        if number > SLOTS:  # the slot held message number - SLOTS, which the receiver must have taken out
            queue.wait([window.word(self._rank, _TAKEN)], number - SLOTS)
        queue.copy(self._slot(target, lane, number, x), x.data_ptr(), x.nbytes)
        queue.write([window.word(target, _ARRIVED)], number)
        window.keep(x)  # the caller's stream does not wait for the copy: its memory must not be given away before

    def receive(self, source: int, out: Tensor) -> None:
        """``out``, contiguous, becomes the next message from a neighbour, in the order of the current stream."""
        lane = self._lane(source, self._rank)
        window = self._lanes[lane]
        self._received[lane] = number = self._received[lane] + 1
        queue = window.here()
        queue.wait([window.word(self._rank, _ARRIVED)], number)
        queue.copy(out.data_ptr(), self._slot(self._rank, lane, number, out), out.nbytes)
        queue.write([window.word(source, _TAKEN)], number)

    def _lane(self, source: int, target: int) -> int:
        """Lane of a message. Of two ranks each is both before and after the other: one lane then serves both ways."""
        return _FROM_PREVIOUS if (source + 1) % self._size == target else _FROM_NEXT

    def _slot(self, rank: int, lane: int, number: int, like: Tensor) -> int:
        if like.nbytes > self._num_bytes:
            raise ValueError(f"a message of {like.nbytes} bytes; this mailbox is for at most {self._num_bytes}")
        return self._lanes[lane].address(rank) + number % SLOTS * self._num_bytes
