"""Transfers among all ranks of a group: started in one place, finished in another, with nothing but copies between.

*Gather*: a rank lays its part out in its own memory, and every peer fetches it from there. *Exchange*: a rank writes
each peer's part into that peer's memory, who consumes what came from everybody. Either way memory has ``SLOTS`` slots
that transfers take in turn, and two words per pair of ranks keep order, which count transfers from 1:

    arrived[peer]   what this rank may read of ``peer``'s transfer with that number
    free[peer]      ``peer`` is done with that transfer, whose slot may be written again

All ranks of a group must start the same transfers in the same order, as for any collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.groups.copy_engines.mailbox import Mailbox
from megatron.core.groups.copy_engines.window import SLOTS, OpenWindow, Queue, Window

LEAST_BYTES = 1 << 20
"""Smaller messages are left to NCCL: a transfer takes the host some ten calls, and a megabyte the links a few
microseconds. An estimate, not a measurement."""
Consume = Callable[[Sequence[Tensor]], Tensor]


class Transfer:
    """A transfer under way (an ``AsyncHandle``). ``source`` is what it reads."""

    def __init__(self, source: object, finish: Callable[[], Tensor]) -> None:
        self._source, self._finish = source, finish

    def wait(self) -> Tensor:
        """The result, complete in the order of the current stream. To be called once."""
        return self._finish()


class _Slots:
    """The windows of one kind of transfer; the latest one grows with the largest message."""

    def __init__(self, rank: int, size: int, open_window: OpenWindow) -> None:
        self._rank, self._size, self._open = rank, size, open_window
        self._windows: list[Window] = []
        """Earlier ones too: peers may still signal there."""
        self._slot_bytes = 0
        self._number = 0

    def begin(self, num_bytes: int) -> _Slot:
        """The next transfer, of up to ``num_bytes`` in the memory of each rank."""
        # all ranks see the same sizes in the same order, so they open a larger window together; its words begin at 0
        if num_bytes > self._slot_bytes:
            self._windows.append(self._open(SLOTS * num_bytes, 2 * self._size))
            self._slot_bytes, self._number = num_bytes, 0
        self._number += 1
        return _Slot(self._windows[-1], self._rank, self._size, self._number, self._slot_bytes)


class _Slot:
    """One transfer's memory and words. Words 0 to n-1 are ``arrived``, words n to 2n-1 ``free``."""

    def __init__(self, window: Window, rank: int, size: int, number: int, slot_bytes: int) -> None:
        self.window, self._rank, self._size, self._number = window, rank, size, number
        self._start = number % SLOTS * slot_bytes

    def address(self, rank: int, offset: int = 0) -> int:
        return self.window.address(rank) + self._start + offset

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Own memory as a tensor."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        return self.window.memory()[self._start : self._start + num_bytes].view(dtype).view(tuple(shape))

    def wait_until_free(self, queue: Queue, peers: Sequence[int]) -> None:
        if self._number > SLOTS:  # the first transfers find slots that nobody has used
            words = [self.window.word(self._rank, self._size + peer) for peer in peers]
            queue.wait(words, self._number - SLOTS)

    def set_free(self, queue: Queue, peers: Sequence[int]) -> None:
        queue.write([self.window.word(peer, self._size + self._rank) for peer in peers], self._number)

    def announce(self, queue: Queue, peers: Sequence[int]) -> None:
        queue.write([self.window.word(peer, self._rank) for peer in peers], self._number)

    def wait_for_arrival(self, queue: Queue, peers: Sequence[int]) -> None:
        queue.wait([self.window.word(self._rank, peer) for peer in peers], self._number)


class CopyEngines:
    """Transfers of one group, as seen by its rank ``rank``."""

    def __init__(self, rank: int, size: int, open_window: OpenWindow, least_bytes: int = LEAST_BYTES) -> None:
        self.rank, self.size, self._open_window, self._least_bytes = rank, size, open_window, least_bytes
        self._others = [(rank + step) % size for step in range(1, size)]
        """Nearest first: no two ranks turn to the same peer at a time."""
        self._gathers, self._exchanges = (_Slots(rank, size, open_window) for _ in range(2))
        self._mailboxes: dict[int, Mailbox] = {}

    def carries(self, num_bytes: int) -> bool:
        """Whether a message of so many bytes from rank to rank is worth it."""
        return num_bytes >= self._least_bytes

    def mailbox(self, num_bytes: int) -> Mailbox:
        """The one for messages of at most this size; all ranks ask for it together."""
        if num_bytes not in self._mailboxes:
            self._mailboxes[num_bytes] = Mailbox(self.rank, self.size, num_bytes, self._open_window)
        return self._mailboxes[num_bytes]

    def all_gather(self, x: Tensor) -> Transfer:
        """[s, ...] of every rank -> [n * s, ...], in the order of ranks."""
        x = x.contiguous()
        whole = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        num_bytes, source, target = x.nbytes, x.data_ptr(), whole.data_ptr()
        slot = self._gathers.begin(num_bytes)
        # a copy within the GPU takes SMs: on a stream of its own it would wait for a GEMM to end
        here = slot.window.here()
        slot.wait_until_free(here, self._others)
        here.copy(slot.address(self.rank), source, num_bytes)
        here.copy(target + self.rank * num_bytes, source, num_bytes)
        # behind both copies, as ``beside`` waits for ``here``: a peer that sees the word reads a complete part
        queue = slot.window.beside()
        slot.announce(queue, self._others)
        for peer in self._others:
            slot.wait_for_arrival(queue, [peer])
            queue.copy(target + peer * num_bytes, slot.address(peer), num_bytes)
            slot.set_free(queue, [peer])  # ordered behind the copy: the peer may overwrite its part from here on
        done = slot.window.mark()

        def finish() -> Tensor:
            slot.window.after(done)
            return whole

        return Transfer(x, finish)

    def exchange(self, parts: Sequence[Tensor], consume: Consume) -> Transfer:
        """``parts[r]``, contiguous and all of one shape, goes to rank r. The result is what ``consume`` makes, once
        everything has come, of the parts for this rank in the order of ranks; it must not keep them."""
        own = parts[self.rank]
        num_bytes, shape, dtype = own.nbytes, (self.size, *own.shape), own.dtype
        slot = self._exchanges.begin(self.size * num_bytes)
        queue = slot.window.beside()
        for peer in self._others:
            slot.wait_until_free(queue, [peer])
            queue.copy(slot.address(peer, self.rank * num_bytes), parts[peer].data_ptr(), num_bytes)
            slot.announce(queue, [peer])
        sent = slot.window.mark()

        def finish() -> Tensor:
            slot.window.after(sent)  # from here on the memory of parts may be used again
            here = slot.window.here()
            slot.wait_for_arrival(here, self._others)
            received = list(slot.memory(shape, dtype).unbind())
            received[self.rank] = own
            result = consume(received)
            slot.set_free(here, self._others)  # behind ``consume`` on its stream, hence it must not keep the parts
            return result

        return Transfer(parts, finish)
