"""Host memory between training, which copies tensors into it, and a thread that writes them to a checkpoint.

Memory comes in slabs, pinned where tensors are on a GPU. While slabs are left, copies are only queued on a stream of
their own, and one synchronisation ends them all; once the limit is reached, training waits until slabs are written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.manifest import BLOCK_BYTES
from megatron.core.dist_checkpointing.writer import flat_bytes

SLAB_BYTES = 8 * BLOCK_BYTES
ALIGNMENT = 512
"""Bytes, of each copy's target: as a GPU's copy engine likes it."""
SHARE_OF_MEMORY = 0.5
"""The share of the host's free memory that all ranks there may take together."""

Slab = tuple[Tensor, list[tuple[int, int]]]
"""Memory, and where the blocks in it begin and end."""


class Staging:
    """One writer at a time takes, in the same order, what ``stage`` was given.

    Args:
        limit: bytes of host memory; at least one slab is taken.
        device: type of the tensors' device.
    """

    def __init__(self, limit: float, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self._slabs_left = max(int(limit // SLAB_BYTES), 1)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._copied: list[Slab] = []
        self._filled: SimpleQueue[Slab | None] = SimpleQueue()
        self._pieces = self._take()

    def stage(self, tensors: Iterable[Tensor]) -> None:
        """Copy ``tensors``; when this returns they may change."""
        on_stream: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            on_stream = torch.cuda.stream(self.stream)
        try:
            with on_stream, torch.no_grad():
                for tensor in tensors:
                    self._copy(flat_bytes(tensor))
            self._hand_over()
        finally:
            self._filled.put(None)

    def _copy(self, data: Tensor) -> None:
        for start in range(0, data.numel(), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            places = self._copied[-1][1] if self._copied else []
            begin = -(-places[-1][1] // ALIGNMENT) * ALIGNMENT if places else SLAB_BYTES
            if begin + block.numel() > SLAB_BYTES:
                begin, slab = 0, self._slab()
                self._copied.append((slab, []))
            slab, places = self._copied[-1]
            slab[begin : begin + block.numel()].copy_(block, non_blocking=True)
            places.append((begin, begin + block.numel()))

    def _slab(self) -> Tensor:
        if self._free.empty() and self._slabs_left:
            self._slabs_left -= 1
            return torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=self.stream is not None)
        if self._free.empty():
            self._hand_over()
        return self._free.get()

    def _hand_over(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
        for slab in self._copied:
            self._filled.put(slab)
        self._copied = []

    def blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """The next blocks, which are those of ``tensor``; only its size counts. Called by the writer."""
        for _ in range(-(-tensor.numel() * tensor.element_size() // BLOCK_BYTES)):
            yield next(self._pieces)

    def end(self) -> None:
        """Drop what the writer has not taken, so that ``stage`` ends. Called by the writer, after success too."""
        for _ in self._pieces:
            pass
        self._pieces = self._take()

    def _take(self) -> Iterator[memoryview]:
        while (filled := self._filled.get()) is not None:
            slab, places = filled
            for begin, end in places:
                yield memoryview(slab[begin:end].numpy())  # type: ignore[arg-type]
            self._free.put(slab)

    def trim(self) -> None:
        """Give ordinary memory back; pinned memory is kept, as a GB of it takes a third of a second to get."""
        while self.stream is None and not self._free.empty():
            self._free.get()
            self._slabs_left += 1


def free_host_memory() -> float:
    """Bytes that processes of this host may still take, as the kernel or the container's limit says."""
    free = 1024.0 * _fields("/proc/meminfo").get("MemAvailable:", 0)
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        folder = Path("/sys/fs/cgroup")
        files = _fields(folder / "memory.stat")  # cached files are counted as used, and go when memory is wanted
        used = int((folder / "memory.current").read_text()) - files["inactive_file"] - files["active_file"]
        free = min(free, int((folder / "memory.max").read_text()) - used)
    return free


def _fields(path: str | Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, Path(path).read_text().splitlines())}


def default_limit(num_bytes: int) -> float:
    """All of a rank's ``num_bytes`` where the free memory of its host holds them for every rank; else 1 GB."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted = 1.25 * num_bytes + SLAB_BYTES  # a block that does not fit at the end of a slab goes to the next
    return wanted if wanted * ranks <= SHARE_OF_MEMORY * free_host_memory() else 1e9
