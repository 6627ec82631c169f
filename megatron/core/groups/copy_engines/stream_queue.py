"""Operations of a CUDA stream without a kernel: memory copies, and words in memory that it waits for and writes.

Through CUDA's driver interface, whose calls here cost the host a few microseconds each: a collective of a transformer
layer is a dozen of them, and there are sixteen such collectives per layer and micro-batch. A stream that waits is held
back by the GPU's front end; neither an SM nor the host waits with it.

Words have 32 bits and may wrap around: one has reached a value if it is ahead of it by less than 2^31. What a stream
did before it writes a word is visible to every reader of the word. (CUDA driver interface, "Stream Memory Operations".)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_AT_LEAST, _WITH_BARRIER = 0, 0  # CU_STREAM_WAIT_VALUE_GEQ, CU_STREAM_WRITE_VALUE_DEFAULT
_FLAGS = {_WAIT: _AT_LEAST, _WRITE: _WITH_BARRIER}


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, a union of 48 bytes; these are the fields that waiting and writing share."""

    _fields_ = [
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("unused", ctypes.c_uint64 * 2),
    ]


assert ctypes.sizeof(_Operation) == 48


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, pointer]
    driver.cuStreamBatchMemOp_v2.argtypes = [pointer, ctypes.c_uint, pointer, ctypes.c_uint]
    return driver


class StreamQueue:
    """Puts operations behind what the stream with handle ``stream`` holds already."""

    def __init__(self, stream: int) -> None:
        self._stream, self._driver = stream, _driver()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Between addresses of this GPU's memory or mapped memory of a peer."""
        _check(self._driver.cuMemcpyAsync(target, source, num_bytes, self._stream))

    def wait(self, addresses: Sequence[int], value: int) -> None:
        """Until the words at ``addresses`` have all reached ``value``."""
        self._words(_WAIT, addresses, value)

    def write(self, addresses: Sequence[int], value: int) -> None:
        """Sets words."""
        self._words(_WRITE, addresses, value)

    def _words(self, kind: int, addresses: Sequence[int], value: int) -> None:
        value, flags = value & 0xFFFFFFFF, _FLAGS[kind]
        operations = (_Operation * len(addresses))()
        for operation, address in zip(operations, addresses):
            operation.operation, operation.address, operation.value, operation.flags = kind, address, value, flags
        _check(self._driver.cuStreamBatchMemOp_v2(self._stream, len(addresses), operations, 0))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}: the driver takes no such operation on a stream")
