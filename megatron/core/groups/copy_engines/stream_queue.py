"""CUDA stream operations without kernels: memory copies, and waiting for and writing 32-bit flag words in memory.

Uses the CUDA driver API, whose calls take a few microseconds of host time each; a collective of a transformer layer
needs about a dozen calls, and a layer has sixteen such collectives per micro-batch. The GPU front end holds back a
waiting stream; neither an SM nor the host waits.

Words may wrap around: a word has reached a value if (word - value) mod 2^32 < 2^31. A reader of a word sees all memory
writes that its stream made before. (CUDA driver API, "Stream Memory Operations".)"""

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
    """Appends operations to the CUDA stream with handle ``stream``. All methods return at once and raise RuntimeError
    if the driver rejects the operation."""

    def __init__(self, stream: int) -> None:
        self._stream, self._driver = stream, _driver()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy ``num_bytes`` between addresses of this GPU's memory or mapped peer memory."""
        _check(self._driver.cuMemcpyAsync(target, source, num_bytes, self._stream))

    def wait(self, addresses: Sequence[int], value: int) -> None:
        """Let the stream wait until the words at all ``addresses`` have reached ``value``."""
        self._words(_WAIT, addresses, value)

    def write(self, addresses: Sequence[int], value: int) -> None:
        """Set the words at ``addresses`` to ``value``, after all earlier work of the stream."""
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
