"""Memory that all ranks of a group on one host see, with words to signal through.

Over torch's symmetric memory (``torch.distributed._symmetric_memory``), without NVLink multicast. Opening a window is a
collective operation of the group. All else works in the order of streams and never stops the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.copy_engines.stream_queue import StreamQueue

SLOTS = 3
"""Messages of one kind that may be in a window at a time."""
_WORD_BYTES = 128
"""From one word to the next: a line of cache each."""


class Queue(Protocol):
    """``StreamQueue`` or a stand-in."""

    def copy(self, target: int, source: int, num_bytes: int) -> None: ...

    def wait(self, addresses: Sequence[int], value: int) -> None: ...

    def write(self, addresses: Sequence[int], value: int) -> None: ...


class Window(Protocol):
    """``num_bytes`` on every rank, and words that start at 0."""

    def address(self, rank: int) -> int:
        """Where the memory of group rank ``rank`` begins."""

    def word(self, rank: int, number: int) -> int:
        """Where its word ``number`` lies."""

    def memory(self) -> Tensor:
        """Own memory, uint8 [num_bytes]."""

    def here(self) -> Queue:
        """Behind what the current stream holds."""

    def beside(self) -> Queue:
        """On a stream of its own, which waits for what the current one holds now."""

    def mark(self) -> Any:
        """Where the stream of its own stands."""

    def after(self, mark: Any) -> None:
        """Lets the current stream wait for ``mark``."""

    def keep(self, x: Tensor) -> None:
        """Memory of ``x`` is not given to others before the stream of its own is done with it."""


OpenWindow = Callable[[int, int], Window]
"""From bytes and words to a window of a group; called by all its ranks together."""


class SymmetricWindow:
    """On GPUs. RuntimeError where the driver or the machine does not allow it."""

    def __init__(self, handle: dist.ProcessGroup, num_bytes: int, num_words: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        start = -(-num_bytes // _WORD_BYTES) * _WORD_BYTES
        own = symmetric.empty(start + num_words * _WORD_BYTES, dtype=torch.uint8, device=device)
        self._shared = symmetric.rendezvous(own, handle)
        # no rank may write a word of a peer that still has to set its words to 0
        own.zero_()
        torch.cuda.synchronize()
        dist.barrier(handle, device_ids=[device.index])
        self._addresses: list[int] = self._shared.buffer_ptrs
        self._words_start, self._memory = start, own[:num_bytes]
        self._stream, self._arrived_here = torch.cuda.Stream(), torch.cuda.Event()
        self._queue = StreamQueue(self._stream.cuda_stream)

    def address(self, rank: int) -> int:
        return self._addresses[rank]

    def word(self, rank: int, number: int) -> int:
        return self._addresses[rank] + self._words_start + number * _WORD_BYTES

    def memory(self) -> Tensor:
        return self._memory

    def here(self) -> StreamQueue:
        return StreamQueue(torch.cuda.current_stream().cuda_stream)

    def beside(self) -> StreamQueue:
        self._arrived_here.record()
        self._stream.wait_event(self._arrived_here)
        return self._queue

    def mark(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def after(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def keep(self, x: Tensor) -> None:
        x.record_stream(self._stream)
