"""Arrays built once and shared by every process that needs them, through a folder and a file lock.

The first process to take the lock builds and writes, each file to a temporary name and renamed, the description last;
nothing is synced: what a power cut takes is rebuilt, and syncs take a minute where there are 2,000 sources. The others
wait on the lock, with a line in the log, and map the files. No collective is involved: any subset of ranks may ask in
any order. What is found is believed only if the description and every shape and dtype match; anything else (a kill, a
full disk) is rebuilt. A folder that cannot be written costs a warning, and each process builds its own.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from megatron.data.mapping import map_npy

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
POLL_SECONDS = 0.05

Arrays = dict[str, np.ndarray]
Layout = dict[str, tuple[tuple[int, ...], str]]
"""Expected shape and dtype name of each array."""


def describe(identity: dict[str, Any]) -> tuple[str, str]:
    """A readable description of what is cached, and its md5: the key of the files."""
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
        identity: all that the arrays depend on, JSON-able.
        layout: the shapes and dtypes that the arrays must have.
    """

    def __init__(self, folder: str | None, kind: str, identity: dict[str, Any], layout: Layout):
        self.folder, self.layout = folder, layout
        self.description, self.key = describe(identity)
        self.base = os.path.join(folder, f"{self.key}-{kind}") if folder else ""

    def get(self, build: Callable[[], Arrays]) -> Arrays:
        """The arrays: mapped from the folder if they are there, else built by ``build``, once for all processes."""
        if self.folder is None:
            return build()
        arrays = self.load()
        if arrays is not None:
            return arrays
        try:
            os.makedirs(self.folder, exist_ok=True)
            lock: BinaryIO = open(f"{self.base}.lock", "ab")  # noqa: SIM115 (closed below, with the lock)
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
        """The arrays of a complete, matching cache, mapped read-only; None otherwise."""
        try:
            with open(f"{self.base}-description.txt", encoding="utf-8") as stream:
                if stream.read() != self.description:
                    return None
            arrays = {name: map_npy(f"{self.base}-{name}.npy") for name in self.layout}
        except (OSError, ValueError, EOFError, SyntaxError, TypeError):  # numpy's answers to a damaged header
            return None
        for name, (shape, dtype) in self.layout.items():
            if arrays[name].shape != shape or arrays[name].dtype.name != dtype:
                return None
        return arrays

    def save(self, arrays: Arrays) -> None:
        """Write the arrays, then the description that makes them count. A rename lost with the power is rebuilt."""
        for name, array in arrays.items():
            with self._renamed(f"{self.base}-{name}.npy") as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)
        with self._renamed(f"{self.base}-description.txt") as stream:
            stream.write(self.description.encode("utf-8"))

    @contextlib.contextmanager
    def _renamed(self, path: str) -> Iterator[BinaryIO]:
        with open(f"{path}.partial", "wb") as stream:  # one writer at a time: the lock is held
            yield stream
        os.replace(f"{path}.partial", path)

    def _remove_partial(self) -> None:
        """What a failed writer left; the next one overwrites what a killed writer left."""
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


def _wait_for(lock: BinaryIO, base: str) -> None:
    """Take the exclusive lock, saying every few seconds that another process holds it."""
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
