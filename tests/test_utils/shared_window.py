"""Copy engines without GPUs: windows in files that the ranks of a gloo group map, where everything happens at once."""

import ctypes
import mmap
import os
import tempfile
import time
from functools import partial

import torch
import torch.distributed as dist

from megatron.core.groups.copy_engines.exchange import CopyEngines

WORD_BYTES = 64
PATIENCE_SECONDS = 30.0


class HostQueue:
    """Operations of a stream, executed by the host."""

    def copy(self, target, source, num_bytes):
        ctypes.memmove(target, source, num_bytes)

    def wait(self, addresses, value):
        deadline = time.monotonic() + PATIENCE_SECONDS
        for address in addresses:
            word = ctypes.c_uint32.from_address(address)
            while (word.value - value) % 2**32 >= 2**31:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a word stands at {word.value} and should reach {value}")
                time.sleep(0)

    def write(self, addresses, value):
        for address in addresses:
            ctypes.c_uint32.from_address(address).value = value


class SharedWindow:
    """``megatron.core.groups.copy_engines.window.Window`` over files."""

    def __init__(self, handle, num_bytes, num_words):
        rank, size = dist.get_rank(handle), dist.get_world_size(handle)
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder, group=handle, group_src=0)
        paths = [os.path.join(folder[0], str(peer)) for peer in range(size)]
        self._words_start = -(-num_bytes // WORD_BYTES) * WORD_BYTES
        with open(paths[rank], "wb") as file:
            file.truncate(self._words_start + num_words * WORD_BYTES)
        dist.barrier(handle)
        self._maps = []
        for path in paths:
            with open(path, "r+b") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0))
        dist.barrier(handle)
        if rank == 0:
            for path in paths:
                os.unlink(path)
            os.rmdir(folder[0])
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._maps]
        self._memory = torch.frombuffer(self._maps[rank], dtype=torch.uint8)[:num_bytes]
        self._queue = HostQueue()

    def address(self, rank):
        return self._addresses[rank]

    def word(self, rank, number):
        return self._addresses[rank] + self._words_start + number * WORD_BYTES

    def memory(self):
        return self._memory

    def current_queue(self):
        return self._queue

    side_queue = current_queue

    def mark(self):
        return None

    def after(self, mark):
        pass

    def keep(self, x):
        pass


def engines_over_shared_memory(name, handle, ranks, rank):
    """In place of ``copy_engines.choice.start_copy_engines``, for a group over gloo."""
    return CopyEngines(rank, len(ranks), partial(SharedWindow, handle), least_bytes=0)
