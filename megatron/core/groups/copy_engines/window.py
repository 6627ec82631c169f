"""Memory shared by all ranks of a group on one host, with flag words for signaling.

Uses torch's symmetric memory (``torch.distributed._symmetric_memory``) without NVLink multicast. Opening a window is
collective. All other operations run in stream order and never block the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.copy_engines.stream_queue import StreamQueue

SLOTS = 3
"""Number of transfers that can be in a window at the same time."""
_WORD_BYTES = 128
"""Distance between flag words: one cache line each."""


class Queue(Protocol):
    """Interface of ``StreamQueue``; tests use a replacement."""

    def copy(self, target: int, source: int, num_bytes: int) -> None: ...

    def wait(self, addresses: Sequence[int], value: int) -> None: ...

    def write(self, addresses: Sequence[int], value: int) -> None: ...


class Window(Protocol):
    """Shared memory of ``num_bytes`` on every rank of a group, plus flag words that start at 0, and a side stream."""

    def address(self, rank: int) -> int:
        """Return the address of the memory of group rank ``rank``."""

    def word(self, rank: int, number: int) -> int:
        """Return the address of word ``number`` of group rank ``rank``."""

    def memory(self) -> Tensor:
        """Return this rank's memory, uint8 [num_bytes]."""

    def current_queue(self) -> Queue:
        """Return a queue on the current stream."""

    def side_queue(self) -> Queue:
        """Return a queue on the side stream, after the current stream's work so far."""

    def mark(self) -> object:
        """Record an event on the side stream."""

    def after(self, mark: Any) -> None:
        """Let the current stream wait for the event ``mark``."""

    def keep(self, x: Tensor) -> None:
        """Protect the memory of ``x`` from reuse until the side stream's work so far is done."""


OpenWindow = Callable[[int, int], Window]
"""(bytes, number of words) -> window of a group. Collective over the group."""


class SymmetricWindow:
    """Window on GPUs. The constructor is collective, waits for the device, and raises RuntimeError if the driver or the
    machine does not support symmetric memory."""

    def __init__(self, handle: dist.ProcessGroup, num_bytes: int, num_words: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        start = -(-num_bytes // _WORD_BYTES) * _WORD_BYTES
        memory = symmetric.empty(start + num_words * _WORD_BYTES, dtype=torch.uint8, device=device)
        self._shared = symmetric.rendezvous(memory, handle)
        # barrier after zeroing: otherwise a peer could signal before this rank resets its words to 0
        memory.zero_()
        torch.cuda.synchronize()
        dist.barrier(handle, device_ids=[device.index])
        self._addresses: list[int] = self._shared.buffer_ptrs
        self._words_start, self._memory = start, memory[:num_bytes]
        self._stream, self._arrived_here = torch.cuda.Stream(), torch.cuda.Event()
        self._queue = StreamQueue(self._stream.cuda_stream)

    def address(self, rank: int) -> int:
        return self._addresses[rank]

    def word(self, rank: int, number: int) -> int:
        return self._addresses[rank] + self._words_start + number * _WORD_BYTES

    def memory(self) -> Tensor:
        return self._memory

    def current_queue(self) -> StreamQueue:
        return StreamQueue(torch.cuda.current_stream().cuda_stream)

    def side_queue(self) -> StreamQueue:
        self._arrived_here.record()
        self._stream.wait_event(self._arrived_here)
        return self._queue

    def mark(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def after(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def keep(self, x: Tensor) -> None:
        x.record_stream(self._stream)
