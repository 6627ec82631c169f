"""Reading of safetensors files, and atomic, resumable output folders of conversions.

A conversion writes to a hidden folder ``.<name>.converting`` in the parent of its target. A journal next to it records
the identity of the conversion and each complete file with checksums. Repeating the same conversion keeps the files
whose bytes still match and continues. One rename publishes the folder."""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import torch
from torch import Tensor

from megatron.core.config.errors import listed
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError, CheckpointWriteError
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.dist_checkpointing.manifest import BLOCK_BYTES
from megatron.core.dist_checkpointing.writer import host_blocks, make_durable_folder, safetensors_header, write_file
from megatron.core.safe_files import (
    create_file,
    fsync_path,
    make_folder,
    open_private,
    open_regular,
    parse_json,
    remove,
)
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.safetensors_header import Entry, read_header

MAX_FILE_BYTES = 4 * 2**30
"""Maximum size of a file; exceeded only by a single tensor that is larger."""
HIDDEN = ".converting"
INDEX = "model.safetensors.index.json"


def tensor_bytes(tensor: LazyTensor) -> int:
    """Return the size of ``tensor`` in bytes."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collection, which scans the many live objects of a large table again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@paused_collection()
def read_safetensors(path: str | os.PathLike) -> dict[str, LazyTensor]:
    """Return the lazy tensors of one file; reads only the header. Raises CheckpointDamagedError."""
    path = Path(path)
    return {name: _StoredTensor(path, name, entry).lazy() for name, entry in read_header(path).items()}


class _StoredTensor:
    __slots__ = ("entry", "name", "path")

    def __init__(self, path: Path, name: str, entry: Entry) -> None:
        self.path, self.name, self.entry = path, name, entry

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.entry.shape, self.entry.dtype, self.read, self.read_rows)

    def read(self) -> Tensor:
        return self._read(self.entry.begin, self.entry.shape)

    def read_rows(self, start: int, stop: int) -> Tensor:
        shape = self.entry.shape[1:]
        row = math.prod(shape) * self.entry.dtype.itemsize
        return self._read(self.entry.begin + start * row, (stop - start, *shape))

    def _read(self, begin: int, shape: tuple[int, ...]) -> Tensor:
        """Raises CheckpointDamagedError if the file is not regular, ends early or cannot be read."""
        # torch.empty, because a bytearray would be zero-filled first
        values = torch.empty(shape, dtype=self.entry.dtype)
        try:
            with open_regular(self.path, buffering=0) as file:
                file.seek(begin)
                view = memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                while view:
                    if not (count := file.readinto(view)):  # type: ignore[attr-defined]
                        raise CheckpointDamagedError(f"{self.path}: ends early, in tensor {self.name}")
                    view = view[count:]
        except OSError as error:
            raise CheckpointDamagedError(f"{self.path}: cannot be read ({error.strerror})") from error
        return values


def in_files(tensors: Mapping[str, LazyTensor], max_bytes: int = MAX_FILE_BYTES) -> list[dict[str, LazyTensor]]:
    """Split ``tensors``, in order, into groups of at most ``max_bytes``; a larger tensor forms its own group. Within a
    group, sorts by decreasing element size, for alignment."""
    groups: list[dict[str, LazyTensor]] = [{}]
    group_bytes = 0
    for name, tensor in tensors.items():
        if groups[-1] and group_bytes + tensor_bytes(tensor) > max_bytes:
            groups.append({})
            group_bytes = 0
        groups[-1][name] = tensor
        group_bytes += tensor_bytes(tensor)
    # wide elements first, so that every tensor of a file starts at a multiple of its element size
    return [dict(sorted(group.items(), key=lambda item: -item[1].dtype.itemsize)) for group in groups if group]


def read_shards(index: Path, read: Callable[[Path], dict[str, LazyTensor]] = read_safetensors) -> dict[str, LazyTensor]:
    """Return the lazy tensors of all files in ``index``, each opened by ``read``; other files of the folder are
    ignored. Raises FileNotFoundError without the index; CheckpointDamagedError for a malformed index, a file name with
    a folder, a missing file, or a file that does not hold exactly the tensors that the index assigns to it."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointDamagedError(f"{index}: weight_map is not a table of files")
    tensors: dict[str, LazyTensor] = {}
    names_in: dict[str, set[str]] = {}
    for name, file in names.items():
        names_in.setdefault(file, set()).add(name)
    for file, expected in sorted(names_in.items()):
        if Path(file).name != file:
            raise CheckpointDamagedError(f"{index}: file name {file!r:.80} is rejected: it names a folder")
        path = index.parent / file
        if not path.is_file():
            raise CheckpointDamagedError(f"{index.parent}: {file} is missing, which holds {listed(sorted(expected))}")
        shard = read(path)
        if missing := sorted(expected - shard.keys()):
            raise CheckpointDamagedError(f"{path}: lacks what {index.name} says that it holds: {listed(missing)}")
        if foreign := sorted(shard.keys() - expected):
            raise CheckpointDamagedError(f"{path}: holds what {index.name} does not name: {listed(foreign)}")
        tensors |= shard
    return tensors


class WrittenFile(TypedDict):
    """Journal entry of a file."""

    bytes: int
    header_bytes: int
    header_crc32: int
    tensors: dict[str, tuple[int, list[int]]]
    """Start and CRC-32 of each block by name; lists when read from the journal."""


class Target:
    """Output folder of a conversion: write to ``folder``, then :meth:`publish` renames it to ``final`` atomically.

    A context manager that never publishes automatically. Creation makes the parents of ``final``, the hidden folder and
    its journal, and takes an exclusive lock, without waiting; exit releases it.

    Args:
        final: the output path; must not exist or be an empty folder.
        identity: JSON that identifies the conversion. A repeated conversion resumes; files of another conversion are
            removed. None: nothing is resumed, and an exception in the context removes the files.

    Raises:
        CheckpointError: ``final`` exists, cannot be written (CheckpointWriteError), or another process is writing it.
    """

    def __init__(self, final: str | os.PathLike, identity: object = None) -> None:
        self.final = Path(os.path.abspath(final))
        self.folder = self.final.with_name(f".{self.final.name}{HIDDEN}")
        self._path = self.folder.with_name(f"{self.folder.name}.journal")
        self._check_final()
        self.finished: dict[str, WrittenFile] = {}
        self._identity = json.loads(json.dumps(identity))
        try:
            make_durable_folder(self.final.parent)
            self._journal = open_private(self._path)  # the lock is held while this file is open
        except OSError as error:
            raise self._unusable(error, "choose another folder") from error
        try:
            fcntl.lockf(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume(self._identity)
        except OSError as error:
            with self._journal as journal:
                if isinstance(error, BlockingIOError | PermissionError) and error.filename is None:
                    reason = "another process is making it; wait for it, or stop it"
                    raise CheckpointError(f"{self.final}: {reason}") from None
                if not os.fstat(journal.fileno()).st_size:  # made just now
                    self._path.unlink(missing_ok=True)
            raise self._unusable(error, "remove it, or choose another name") from error

    def _unusable(self, error: OSError, fix: str) -> CheckpointWriteError:
        return CheckpointWriteError(f"{self.final}: {error.filename or self._path}: {error.strerror}; {fix}")

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._identity is None:
            remove(self.folder)
            self._path.unlink(missing_ok=True)
        self._journal.close()

    def _check_final(self) -> None:
        # rename cannot replace a symbolic link by the published folder
        empty = not self.final.is_symlink() and self.final.is_dir() and not any(self.final.iterdir())
        if os.path.lexists(self.final) and not empty:
            raise CheckpointError(f"{self.final}: exists already; choose another name, or remove it")

    def _resume(self, identity: object) -> None:
        """Keep the files of an earlier attempt with the same ``identity`` whose checksums match; remove all others."""
        make_folder(self.folder, private=True)
        self._journal.seek(0)
        lines: list[Any] = []
        for line in self._journal.read().splitlines():
            with suppress(ValueError):  # a partial last line of a killed process
                lines.append(parse_json(line))
        completed: dict[str, WrittenFile] = {}
        if identity is not None and lines and lines[0] == identity:
            completed = {line[0]: line[1] for line in lines[1:] if _is_entry(line)}
        else:
            remove(self.folder)
            make_folder(self.folder, private=True)
        self._remove_all_but(completed)
        self.finished = {name: entry for name, entry in completed.items() if self._matches(name, entry)}
        self._remove_all_but(self.finished)
        self._journal.truncate(0)
        self._append(identity)
        for item in self.finished.items():
            self._append(item)

    def _remove_all_but(self, names: Container[str]) -> None:
        """Also removes all symbolic links: their targets are outside of this folder."""
        for parent, folders, files in os.walk(self.folder):
            for path in (Path(parent, name) for name in (*folders, *files)):
                if path.is_symlink() or not (path.is_dir() or str(path.relative_to(self.folder)) in names):
                    path.unlink()

    def _append(self, value: object) -> None:
        self._journal.write(json.dumps(value).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _matches(self, name: str, entry: WrittenFile) -> bool:
        """Compare size and checksums with the journal entry; False for a missing file, a link or a bad entry."""
        try:
            with open_regular(self.folder / name, follow=False) as file:
                right = os.fstat(file.fileno()).st_size == entry["bytes"]
                right = right and zlib.crc32(file.read(entry["header_bytes"])) == entry["header_crc32"]
                starts = [*(start for start, _ in entry["tensors"].values()), entry["bytes"]]
                for (_, blocks), start, end in zip(entry["tensors"].values(), starts, starts[1:]):
                    sizes = [min(BLOCK_BYTES, end - at) for at in range(start, end, BLOCK_BYTES)]
                    right = right and [zlib.crc32(file.read(size)) for size in sizes] == blocks
                return right
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return False

    def write(self, name: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> WrittenFile:
        """Write and fsync the safetensors file ``name`` (a path below the folder); record it in the journal and return
        its entry.

        Reads ``tensors`` one at a time. The entry holds ``bytes``, ``header_bytes``, ``header_crc32`` and ``tensors``:
        name -> [start, [crc32 of each block]]. For a name in ``finished`` (also of an earlier attempt) only returns its
        entry, and ignores ``tensors``. Replaces an incomplete file."""
        if name in self.finished:
            return self.finished[name]
        kinds = ((key, tensor.dtype, tensor.shape) for key, tensor in tensors.items())
        header, starts = safetensors_header(kinds, metadata)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with create_file(path) as file:
            file.write(header)
            blocks = {key: (start, list(_write(file, key, tensors[key]))) for key, start in zip(tensors, starts)}
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        entry: WrittenFile = {
            "bytes": size,
            "header_bytes": len(header),
            "header_crc32": zlib.crc32(header),
            "tensors": blocks,
        }
        fsync_path(path.parent)
        self.finished[name] = entry
        self._append([name, entry])
        return entry

    def write_shards(self, tensors: Mapping[str, LazyTensor], max_bytes: int = MAX_FILE_BYTES) -> None:
        """Write ``model.safetensors``, or, above ``max_bytes``, ``model-00001-of-0000n.safetensors`` … and their index.
        A larger tensor gets a separate file. Nothing is written without tensors."""
        shards, names = in_files(tensors, max_bytes), dict[str, str]()
        for number, shard in enumerate(shards, 1):
            several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = several if len(shards) > 1 else "model.safetensors"
            self.write(file, shard, {"format": "pt"})
            names |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(tensor_bytes(tensor) for tensor in tensors.values())
            self.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))})

    def write_json(self, name: str, value: object) -> None:
        """Write ``value`` as indented JSON to the file ``name``; not recorded in the journal."""
        write_file(self.folder / name, json.dumps(value, indent=2).encode() + b"\n")

    def publish(self) -> None:
        """Fsync all files, rename the folder to its final name (an empty folder there is replaced) and delete the
        journal; the lock is held until exit. Raises CheckpointError if ``final`` was created meanwhile."""
        self._check_final()
        for path in [*self.folder.rglob("*"), self.folder]:
            fsync_path(path)
        os.rename(self.folder, self.final)
        fsync_path(self.final.parent)
        self._path.unlink()


def _is_entry(line: object) -> bool:
    """Whether a journal line is ``[name, entry]`` with a path inside of the folder."""
    return (
        isinstance(line, list)
        and len(line) == 2
        and isinstance(line[0], str)
        and isinstance(line[1], dict)
        and ".." not in Path(line[0]).parts
        and not os.path.isabs(line[0])
    )


def _write(file: BinaryIO, name: str, tensor: LazyTensor) -> Iterator[int]:
    """Append the bytes of ``tensor`` and yield the CRC-32 of each block. CheckpointError for another shape or dtype."""
    values = tensor.read()
    if tuple(values.shape) != tuple(tensor.shape) or values.dtype != tensor.dtype:
        raise CheckpointError(
            f"{name}: read as {values.dtype} {list(values.shape)}, announced as {tensor.dtype} {list(tensor.shape)}"
        )
    for block in host_blocks(values):
        file.write(block)
        yield zlib.crc32(block)
