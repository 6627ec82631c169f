"""Arrays built once and shared by every process that needs them, through a folder and a file lock.

The first process to take the lock builds and writes, each file to a temporary name and renamed, the description last;
the others wait on the lock, with a line in the log, and map the files. No collective is involved, so any subset of
ranks may ask in any order. What is found is believed only if the description, every shape, dtype and checksum match and
every number lies in its range; anything else is rebuilt. A folder that cannot be written costs a warning, and each
process builds its own.

Nothing is synced to disk. A start with 2,000 sources and three splits writes 24,000 files, and an fsync of each would
take minutes on a shared file system, for arrays that are rebuilt in seconds. A rename orders what other processes see;
a power cut may leave a renamed file with other bytes, and these the checksum finds."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from megatron.core.safe_files import create_file, open_regular, open_to_append, parse_json
from megatron.data.mapping import map_npy

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
POLL_SECONDS = 0.05
MAX_CHECKSUM_BYTES = 4096

Arrays = dict[str, np.ndarray]
Layout = Mapping[str, tuple[tuple[int | None, ...], str]]
"""Expected shape (None: any size) and dtype name of each array."""
Bounds = Mapping[str, Sequence[tuple[int, int]]]
"""Smallest and largest value of each column (the last axis; one of a vector) of each array."""


def describe(identity: Mapping[str, object]) -> tuple[str, str]:
    """Return a readable description of the cached arrays and its md5, which is the key of the files."""
    text = json.dumps(identity, indent=4)
    return text, hashlib.md5(text.encode("utf-8"), usedforsecurity=False).hexdigest()


def file_stamp(path: str) -> list[int]:
    """Size and modification time (ns): changes when the file is replaced."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


class IndexCache:
    """The arrays of one description in one folder, ``<md5>-<kind>-<split>-<array>.npy``.

    Args:
        folder: where the files live; None keeps everything in memory.
        kind: the middle of the file names, such as ``GPTDataset-train``.
        identity: every value that the arrays depend on; must be JSON-serializable.
        layout: the shapes and dtypes that the arrays must have.
        bounds: the ranges that their values must lie in."""

    def __init__(
        self,
        folder: str | None,
        kind: str,
        identity: Mapping[str, object],
        layout: Layout,
        bounds: Bounds | None = None,
    ):
        self.folder, self.layout, self.bounds = folder, layout, bounds or {}
        self.damage = ""
        """Why what :meth:`load` found last was not believed; empty where nothing was found."""
        self.description, self.key = describe(identity)
        self.base = os.path.join(folder, f"{self.key}-{kind}") if folder else ""

    def get(self, build: Callable[[], Arrays]) -> Arrays:
        """Return the arrays, mapped read-only from the cache folder if complete, else from ``build()``, which runs in
        one process while others wait for the lock; damage is logged and built again. Without a folder (None) builds in
        memory; with an unusable one (no locks, read-only, full) also, with a warning. Errors of ``build()`` pass."""
        if self.folder is None:
            return build()
        arrays = self.load()
        if arrays is not None:
            return arrays
        try:
            os.makedirs(self.folder, exist_ok=True)
            lock: BinaryIO = open_to_append(f"{self.base}.lock")  # closed below, with the lock
        except OSError as error:
            return self._build_in_memory(build, error)
        with lock:
            try:
                _wait_for(lock, self.base)
            except OSError as error:  # a file system without locks
                return self._build_in_memory(build, error)
            arrays = self.load()
            if arrays is not None:
                return arrays
            if self.damage:
                logger.warning("the index cache is damaged and built again: %s", self.damage)
            arrays = build()
            try:
                self.save(arrays)
            except OSError as error:
                self._remove_partial()
                logger.warning(
                    "cannot write the index cache %s: %s; --data-cache-path chooses another folder", self.folder, error
                )
                return arrays
            return self.load() or arrays  # mapped: the processes of a machine share the pages

    def load(self) -> Arrays | None:
        """Return the arrays of a complete cache with the same description, mapped read-only, after checking checksums,
        shapes and ranges; None otherwise. ``self.damage`` is then the reason, empty if there is no cache."""
        self.damage = ""
        try:
            with open_regular(f"{self.base}-description.txt") as stream:
                content = stream.read(len(self.description.encode()) + MAX_CHECKSUM_BYTES)
        except OSError:
            return None
        if content == self.description.encode():  # of a version without checksums
            return None
        try:
            checksums = self._checksums(content)
            return {name: self._read(name, checksums.get(name)) for name in self.layout}
        except (OSError, ValueError) as error:
            self.damage = str(error)
            return None

    def _checksums(self, content: bytes) -> dict[str, object]:
        """Raises ValueError if the last line's checksum or the description does not match; the arrays are not read."""
        body, _, checksum = content.rpartition(b"\n")
        text, _, line = body.rpartition(b"\n")
        if checksum != b"%08x" % zlib.crc32(body) or text != self.description.encode():
            raise ValueError(f"{self.base}-description.txt is not what was written")
        checksums = parse_json(line)
        if not isinstance(checksums, dict):
            raise ValueError(f"{self.base}-description.txt is not what was written")
        return checksums

    def _read(self, name: str, checksum: object) -> np.ndarray:
        """Read all of an array; raise ValueError, with the file, if shape, dtype, checksum or range differ."""
        path = f"{self.base}-{name}.npy"
        array = map_npy(path)
        shape, dtype = self.layout[name]
        fits = len(array.shape) == len(shape) and all(want in (None, size) for want, size in zip(shape, array.shape))
        if not fits or array.dtype.name != dtype:
            raise ValueError(f"{path} holds {array.dtype.name}{list(array.shape)} instead of {dtype}{list(shape)}")
        if _checksum(array) != checksum:
            raise ValueError(f"{path} does not have the checksum {checksum} that was written with it")
        for column, (low, high) in enumerate(self.bounds.get(name, ())):
            values = array if array.ndim == 1 else array[..., column]
            if values.size and not (low <= int(values.min()) and int(values.max()) <= high):
                raise ValueError(f"{path} holds numbers outside {low} to {high}")
        return array

    def save(self, arrays: Arrays) -> None:
        """Write each array, then the description with checksums, each to a temporary name that is renamed, without
        fsync. Readers ignore a cache without description. The lock must be held. Raises OSError."""
        for name, array in arrays.items():
            with self._renamed(f"{self.base}-{name}.npy") as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)
        checksums = json.dumps({name: _checksum(array) for name, array in arrays.items()})
        body = f"{self.description}\n{checksums}".encode()
        with self._renamed(f"{self.base}-description.txt") as stream:
            stream.write(b"%b\n%08x" % (body, zlib.crc32(body)))

    @contextlib.contextmanager
    def _renamed(self, path: str) -> Iterator[BinaryIO]:
        with create_file(f"{path}.partial") as stream:  # one writer at a time: the lock is held
            yield stream
        os.replace(f"{path}.partial", path)  # no fsync before: see the module

    def _remove_partial(self) -> None:
        """Remove files of a failed writer; the next one overwrites those of a killed writer."""
        for name in ("description.txt", *(f"{name}.npy" for name in self.layout)):
            with contextlib.suppress(OSError):
                os.unlink(f"{self.base}-{name}.partial")

    def _build_in_memory(self, build: Callable[[], Arrays], error: OSError) -> Arrays:
        logger.warning(
            "the index cache %s cannot be used (%s); building in memory. --data-cache-path chooses another folder",
            self.folder,
            error,
        )
        return build()


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0


def _wait_for(lock: BinaryIO, base: str) -> None:
    """Log every few seconds that another process builds ``base``. Raises OSError on file systems without locks."""
    start = last = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
            if now - last >= PROGRESS_SECONDS:
                logger.info("waiting for another process to build %s (%.0f s so far)", base, now - start)
                last = now
            time.sleep(POLL_SECONDS)
