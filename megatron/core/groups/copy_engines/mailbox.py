"""Point-to-point messages between neighbor ranks of a ring, received in the order of sending.

A sender writes into the neighbor's memory as soon as the slot is free, even if no receive has been posted. The
receiver's stream waits when it needs the message, copies it out and frees the slot. Receives therefore need not be
posted early, and waiting occupies no SM."""

from __future__ import annotations

from torch import Tensor

from megatron.core.groups.copy_engines.window import SLOTS, OpenWindow

_FROM_PREVIOUS, _FROM_NEXT = 0, 1
_ARRIVED, _RECEIVED = 0, 1


class Mailbox:
    """Mailbox for messages of at most ``num_bytes`` each. The constructor is collective over the group. Every rank
    receives in two lanes, from the previous and from the next rank. Each lane has a separate window, so that a message
    that waits for a free slot does not block the other lane. Flag words count the messages that have arrived at this
    rank, and the messages sent by this rank that the receiver has copied out."""

    def __init__(self, rank: int, size: int, num_bytes: int, open_window: OpenWindow) -> None:
        self._rank, self._size, self._num_bytes = rank, size, num_bytes
        self._lanes = [open_window(SLOTS * num_bytes, 2) for _ in (_FROM_PREVIOUS, _FROM_NEXT)]
        self._sent, self._received = [0, 0], [0, 0]
        """Number of messages so far, by lane at the receiver."""

    def send(self, target: int, x: Tensor) -> None:
        """Start to send contiguous ``x`` to the neighbor ``target`` on a side stream, after the current stream's work.
        The side stream waits until the receiver has freed a slot. ``x`` may be freed, but not overwritten, before the
        copy is done. Raises ValueError if ``x`` is larger than the mailbox, which is then unusable."""
        lane = self._lane(self._rank, target)
        window = self._lanes[lane]
        self._sent[lane] = number = self._sent[lane] + 1
        queue = window.side_queue()
        if number > SLOTS:  # the slot held message number - SLOTS, which the receiver must have copied out
            queue.wait([window.word(self._rank, _RECEIVED)], number - SLOTS)
        queue.copy(self._slot(target, lane, number, x), x.data_ptr(), x.nbytes)
        queue.write([window.word(target, _ARRIVED)], number)
        window.keep(x)  # the caller's stream does not wait for the copy: without this the allocator could reuse x early

    def receive(self, source: int, out: Tensor) -> None:
        """Copy the next message from the neighbor ``source`` into contiguous ``out`` and free its slot; messages arrive
        in the order of sending. The current stream waits for the message, not the host. Raises ValueError if ``out`` is
        larger than the mailbox; the size must equal the sender's."""
        lane = self._lane(source, self._rank)
        window = self._lanes[lane]
        self._received[lane] = number = self._received[lane] + 1
        queue = window.current_queue()
        queue.wait([window.word(self._rank, _ARRIVED)], number)
        queue.copy(out.data_ptr(), self._slot(self._rank, lane, number, out), out.nbytes)
        queue.write([window.word(source, _RECEIVED)], number)

    def _lane(self, source: int, target: int) -> int:
        """Return the receiver's lane. In a ring of two each rank is both previous and next; only one lane is used."""
        return _FROM_PREVIOUS if (source + 1) % self._size == target else _FROM_NEXT

    def _slot(self, rank: int, lane: int, number: int, like: Tensor) -> int:
        if like.nbytes > self._num_bytes:
            raise ValueError(f"a message of {like.nbytes} bytes; this mailbox is for at most {self._num_bytes}")
        return self._lanes[lane].address(rank) + number % SLOTS * self._num_bytes
