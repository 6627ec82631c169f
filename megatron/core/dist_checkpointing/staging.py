"""Host staging memory of background saves: training copies tensors into it, a thread writes them to the checkpoint.

Memory is allocated in slabs, pinned for GPU tensors. Copies are queued on a separate stream and synchronized once at
the end. When the memory limit is reached, training waits until the writer has freed slabs."""

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
"""Alignment in bytes of each copy's target, for fast GPU copies."""
SHARE_OF_MEMORY = 0.5
"""Fraction of the host's free memory that all its ranks together may use."""

Slab = tuple[Tensor, list[tuple[int, int]]]
"""uint8 memory and the (begin, end) byte ranges of its blocks."""


class Staging:
    """Queue of copied tensor blocks for a single writer thread, in the order of ``stage``. ``limit``: maximum bytes of
    host memory (at least one slab); ``device``: device type of the tensors."""

    def __init__(self, limit: float, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self._slabs_left = max(int(limit // SLAB_BYTES), 1)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._copied: list[Slab] = []
        self._filled: SimpleQueue[Slab | None] = SimpleQueue()
        self._pieces = self._take()

    def stage(self, tensors: Iterable[Tensor]) -> None:
        """Copy ``tensors`` block by block to host memory and pass the blocks, then an end mark (also after an
        exception), to the writer thread. Afterwards the tensors may be modified. Blocks on the device copies, and on
        the writer once the memory limit is reached. Does not wait until the writer is done."""
        on_stream: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.stream is not None:
            # the optimizer step that writes the tensors may still be running
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
        """Only enqueues copies from a GPU. :meth:`_slab` may wait for a slab into which a block fits."""
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
        """Return a free slab, a new one while the limit allows; else hand queued copies to the writer and wait."""
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
        """Yield the next staged blocks, which must belong to ``tensor``; uses only its size. Called by the writer. A
        block is valid until the next one is requested."""
        for _ in range(-(-tensor.numel() * tensor.element_size() // BLOCK_BYTES)):
            yield next(self._pieces)

    def end(self) -> None:
        """Discard remaining blocks so that ``stage`` can return. The writer must always call it, also on success."""
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
        """Free unused pageable slabs; keep pinned slabs, because pinning 1 GB takes a third of a second."""
        while self.stream is None and not self._free.empty():
            self._free.get()
            self._slabs_left += 1


def free_host_memory() -> float:
    """Return the available host memory in bytes: the minimum of MemAvailable and the remaining limit of a version-2
    cgroup, if any, where page cache counts as free."""
    free = 1024.0 * _fields("/proc/meminfo").get("MemAvailable:", 0)
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        folder = Path("/sys/fs/cgroup")
        files = _fields(folder / "memory.stat")  # the page cache counts as used, but is reclaimable
        used = int((folder / "memory.current").read_text()) - files["inactive_file"] - files["active_file"]
        free = min(free, int((folder / "memory.max").read_text()) - used)
    return free


def _fields(path: str | Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, Path(path).read_text().splitlines())}


def default_limit(num_bytes: int) -> float:
    """Return a staging limit in bytes for a rank: 1.25 ``num_bytes`` plus a slab, if that times the host's
    ``LOCAL_WORLD_SIZE`` ranks (default 1) is at most half of the free memory; else 1 GB."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = 1.25 * num_bytes + SLAB_BYTES  # 25% more, because blocks are not split across slabs
    return limit if limit * ranks <= SHARE_OF_MEMORY * free_host_memory() else 1e9
