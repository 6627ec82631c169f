"""Asynchronous all-gather and all-to-all within a group, with memory copies only.

*All-gather*: each rank copies its shard into its window, and every peer reads it from there. *Exchange* (all-to-all):
each rank writes a part into the window of every peer, which then consumes the parts from all ranks. A window has
``SLOTS`` slots that successive transfers use round-robin. Two flag words per pair of ranks, which hold transfer numbers
from 1, synchronize them:

    arrived[peer]   this rank may read ``peer``'s data of the transfer with this number
    free[peer]      ``peer`` has finished with the transfer with this number, and its slot may be overwritten

All ranks of a group must start the same transfers in the same order, as for any collective."""

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
    """Windows of one kind of transfer; a larger message opens a larger window."""

    def __init__(self, rank: int, size: int, open_window: OpenWindow) -> None:
        self._rank, self._size, self._open = rank, size, open_window
        self._windows: list[Window] = []
        """All windows opened so far. Earlier ones must stay alive, because peers may still signal in them."""
        self._slot_bytes = 0
        self._number = 0

    def begin(self, num_bytes: int) -> _Slot:
        """Return the slot of the next transfer. Collective if ``num_bytes`` is a new maximum: opens a window."""
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
        self._peers = [(rank + step) % size for step in range(1, size)]
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
        shards on a side stream. A message larger than all before opens a larger window, which waits for the device."""
        x = x.contiguous()
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        num_bytes, source, target = x.nbytes, x.data_ptr(), gathered.data_ptr()
        slot = self._gathers.begin(num_bytes)
        # copies within a GPU use SMs: queue them on the current stream, as on a side stream they would wait for a GEMM
        current = slot.window.current_queue()
        slot.wait_until_free(current, self._peers)
        current.copy(slot.address(self.rank), source, num_bytes)
        current.copy(target + self.rank * num_bytes, source, num_bytes)
        # the side stream waits for both copies, so that a peer that sees the word reads a complete shard
        queue = slot.window.side_queue()
        slot.announce(queue, self._peers)
        for peer in self._peers:
            slot.wait_for_arrival(queue, [peer])
            queue.copy(target + peer * num_bytes, slot.address(peer), num_bytes)
            slot.set_free(queue, [peer])  # ordered after the copy: afterwards the peer may overwrite its shard
        copied = slot.window.mark()

        def finish() -> Tensor:
            slot.window.after(copied)
            return gathered

        return Transfer(x, finish)

    def exchange(self, parts: Sequence[Tensor], consume: Consume) -> Transfer:
        """Start an all-to-all: ``parts[r]``, n contiguous tensors of shapes equal on all ranks, goes to rank r on a
        side stream. Collective. ``wait()`` calls ``consume`` on the current stream with the parts received from ranks 0
        to n-1 (the local part itself) and returns its result. ``consume`` must not keep references to the parts, whose
        memory is reused, and ``parts`` must not change until ``wait()``."""
        local = parts[self.rank]
        num_bytes, shape, dtype = local.nbytes, (self.size, *local.shape), local.dtype
        slot = self._exchanges.begin(self.size * num_bytes)
        queue = slot.window.side_queue()
        for peer in self._peers:
            slot.wait_until_free(queue, [peer])
            queue.copy(slot.address(peer, self.rank * num_bytes), parts[peer].data_ptr(), num_bytes)
            slot.announce(queue, [peer])
        sent = slot.window.mark()

        def finish() -> Tensor:
            slot.window.after(sent)  # afterwards the memory of ``parts`` may be reused
            current = slot.window.current_queue()
            slot.wait_for_arrival(current, self._peers)
            received = list(slot.memory(shape, dtype).unbind())
            received[self.rank] = local
            result = consume(received)
            slot.set_free(current, self._peers)  # ordered after ``consume``: peers may overwrite the received parts now
            return result

        return Transfer(parts, finish)
