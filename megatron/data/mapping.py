"""Files as read-only arrays, mapped by the C library.

Python's own ``mmap`` (hence ``numpy.memmap``) keeps a file descriptor open per mapping before 3.13: eight per source of
a blend, which ends at 128 sources where a process may open 1024 files. A mapping needs none. It is released when the
last array that views it is deleted, in any module."""

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from tokenize import TokenError

import numpy as np

from megatron.core.safe_files import open_regular

_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    def __init__(self, address: int, size: int, unmap: Callable[..., int]):
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}
        release = weakref.finalize(self, unmap, ctypes.c_void_p(address), ctypes.c_size_t(size))
        release.atexit = False  # arrays may still be read while the interpreter shuts down


@functools.cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    return library


def map_file(path: str) -> np.ndarray:
    """Return the bytes of a regular file as a read-only uint8 array that stays valid as long as any view of it, even if
    the file is unlinked; later writes to the file show in it. An empty file gives an empty array. Raises OSError."""
    with open_regular(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=np.uint8)
        library = _c_library()
        address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    return np.asarray(_Mapping(address, size, library.munmap))


def map_npy(path: str) -> np.ndarray:
    """Return the array of a ``.npy`` file, mapped read-only; never unpickles objects. Raises ValueError for another
    file, another format version, column-major order, or a wrong size; OSError if it cannot be opened."""
    with open_regular(path) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            if version != (1, 0):
                raise ValueError(f"version {version} of the format")
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
        except (ValueError, EOFError, SyntaxError, TypeError, TokenError) as error:  # numpy's answers to a bad header
            raise ValueError(f"{path} is no array of numbers: {error}") from error
        start = stream.tell()
    buffer = map_file(path)
    if dtype.hasobject or fortran_order or len(buffer) - start != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise ValueError(f"{path} is no complete array of numbers")
    return buffer[start:].view(dtype).reshape(shape)
