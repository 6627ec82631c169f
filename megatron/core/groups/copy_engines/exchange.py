"""Asynchronous all-gather and all-to-all within a group, with memory copies only.

*All-gather*: each rank copies its shard into its window, and every peer reads it from there. *Exchange* (all-to-all):
each rank writes a part into the window of every peer, which then consumes the parts from all ranks. A window has
``SLOTS`` slots that successive transfers use round-robin. Two flag words per pair of ranks, which hold transfer numbers
from 1, synchronize them:

    arrived[peer]   this rank may read ``peer``'s data of the transfer with this number
    free[peer]      ``peer`` has finished with the transfer with this number, and its slot may be overwritten

All ranks of a group must start the same transfers in the same order, as for any collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.groups.copy_engines.mailbox import Mailbox
from megatron.core.groups.copy_engines.window import SLOTS, OpenWindow, Queue, Window

LEAST_BYTES = 1 << 20
"""Minimum message size in bytes; smaller messages use NCCL, because a transfer needs about ten driver calls, while a
megabyte takes a few microseconds on NVLink. An estimate, not a measurement."""
Consume = Callable[[list[Tensor]], Tensor]


class Transfer:
    """Transfer in flight (an ``AsyncHandle``). Keeps a reference to ``source``, the tensors that it reads."""

    def __init__(self, source: object, finish: Callable[[], Tensor]) -> None:
        self._source, self._finish = source, finish

    def wait(self) -> Tensor:
        """Return the result, complete in the order of the current stream; the host does not wait. Call it once."""
        return self._finish()


class _Slots:
    """Windows of one kind of transfer; opens a larger window when a larger message occurs."""

    def __init__(self, rank: int, size: int, open_window: OpenWindow) -> None:
        self._rank, self._size, self._open = rank, size, open_window
        self._windows: list[Window] = []
        """All windows opened so far. Earlier ones must stay alive, because peers may still signal in them."""
        self._slot_bytes = 0
        self._number = 0

    def begin(self, num_bytes: int) -> _Slot:
        """Return the slot of the next transfer, with at least ``num_bytes`` on each rank. Collective if ``num_bytes``
        exceeds the size of all earlier transfers, as it then opens a larger window."""
        # all ranks see the same sizes in the same order, so they open windows together; words of a new window are 0
        if num_bytes > self._slot_bytes:
            self._windows.append(self._open(SLOTS * num_bytes, 2 * self._size))
            self._slot_bytes, self._number = num_bytes, 0
        self._number += 1
        return _Slot(self._windows[-1], self._rank, self._size, self._number, self._slot_bytes)


class _Slot:
    """Memory and flag words of one transfer among n ranks. Words 0 to n-1 are ``arrived``, words n to 2n-1 ``free``."""

    def __init__(self, window: Window, rank: int, size: int, number: int, slot_bytes: int) -> None:
        self.window, self._rank, self._size, self._number = window, rank, size, number
        self._start = number % SLOTS * slot_bytes

    def address(self, rank: int, offset: int = 0) -> int:
        return self.window.address(rank) + self._start + offset

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return this rank's slot memory as a tensor view."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        return self.window.memory()[self._start : self._start + num_bytes].view(dtype).view(tuple(shape))

    def wait_until_free(self, queue: Queue, peers: Sequence[int]) -> None:
        if self._number > SLOTS:  # the first SLOTS transfers use fresh slots
            words = [self.window.word(self._rank, self._size + peer) for peer in peers]
            queue.wait(words, self._number - SLOTS)

    def set_free(self, queue: Queue, peers: Sequence[int]) -> None:
        queue.write([self.window.word(peer, self._size + self._rank) for peer in peers], self._number)

    def announce(self, queue: Queue, peers: Sequence[int]) -> None:
        queue.write([self.window.word(peer, self._rank) for peer in peers], self._number)

    def wait_for_arrival(self, queue: Queue, peers: Sequence[int]) -> None:
        queue.wait([self.window.word(self._rank, peer) for peer in peers], self._number)


class CopyEngines:
    """All-gather, exchange and mailboxes of one group, for its rank ``rank``."""

    def __init__(self, rank: int, size: int, open_window: OpenWindow, least_bytes: int = LEAST_BYTES) -> None:
        self.rank, self.size, self._open_window, self._least_bytes = rank, size, open_window, least_bytes
        self._others = [(rank + step) % size for step in range(1, size)]
        """Other ranks, starting with the next one, so that no two ranks access the same peer at the same time."""
        self._gathers, self._exchanges = (_Slots(rank, size, open_window) for _ in range(2))
        self._mailboxes: dict[int, Mailbox] = {}

    def carries(self, num_bytes: int) -> bool:
        """Return whether messages of this size should use copy engines instead of NCCL."""
        return num_bytes >= self._least_bytes

    def mailbox(self, num_bytes: int) -> Mailbox:
        """Return the mailbox for messages of at most ``num_bytes``; cached. The first call per size is collective."""
        if num_bytes not in self._mailboxes:
            self._mailboxes[num_bytes] = Mailbox(self.rank, self.size, num_bytes, self._open_window)
        return self._mailboxes[num_bytes]

    def all_gather(self, x: Tensor) -> Transfer:
        """Start an all-gather: [s, ...] on every rank -> [n * s, ...] in rank order, a new tensor, which ``wait()`` of
        the returned transfer gives. Collective. Copies ``x`` into the window on the current stream, and the peers'
        shards on a side stream. Keeps a reference to ``x``. A message larger than all before opens a larger window,
        which waits for the device."""
        x = x.contiguous()
        whole = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        num_bytes, source, target = x.nbytes, x.data_ptr(), whole.data_ptr()
        slot = self._gathers.begin(num_bytes)
        # copies within a GPU use SMs: queue them on the current stream, as on a side stream they would wait for a GEMM
        here = slot.window.here()
        slot.wait_until_free(here, self._others)
        here.copy(slot.address(self.rank), source, num_bytes)
        here.copy(target + self.rank * num_bytes, source, num_bytes)
        # the side stream waits for both copies, so that a peer that sees the word reads a complete shard
        queue = slot.window.beside()
        slot.announce(queue, self._others)
        for peer in self._others:
            slot.wait_for_arrival(queue, [peer])
            queue.copy(target + peer * num_bytes, slot.address(peer), num_bytes)
            slot.set_free(queue, [peer])  # ordered after the copy: afterwards the peer may overwrite its shard
        done = slot.window.mark()

        def finish() -> Tensor:
            slot.window.after(done)
            return whole

        return Transfer(x, finish)

    def exchange(self, parts: Sequence[Tensor], consume: Consume) -> Transfer:
        """Start an all-to-all: ``parts[r]``, n contiguous tensors of shapes equal on all ranks, goes to rank r on a
        side stream. Collective. ``wait()`` calls ``consume`` on the current stream with the parts received from ranks 0
        to n-1 (the local part itself) and returns its result. ``consume`` must not keep references to the parts, whose
        memory is reused, and ``parts`` must not change until ``wait()``."""
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
            slot.window.after(sent)  # afterwards the memory of ``parts`` may be reused
            here = slot.window.here()
            slot.wait_for_arrival(here, self._others)
            received = list(slot.memory(shape, dtype).unbind())
            received[self.rank] = own
            result = consume(received)
            slot.set_free(here, self._others)  # ordered after ``consume``: peers may overwrite the received parts now
            return result

        return Transfer(parts, finish)
