"""Safetensors files of other programs, and folders that a conversion makes: atomically, tensor by tensor, resumably.

A conversion writes to a hidden folder ``.<name>.converting`` beside its target and keeps a journal beside that: what is
converted (its identity) and each complete file with its checksums. The same conversion, started again, keeps the files
whose bytes still match and goes on; one rename publishes the folder.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.core.config.errors import listed
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError, CheckpointWriteError
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.dist_checkpointing.manifest import BLOCK_BYTES, MAX_HEADER_BYTES
from megatron.core.dist_checkpointing.writer import fsync_path, host_blocks, safetensors_header, write_file
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.sharding.sharded_tensor import DTYPES

MAX_FILE_BYTES = 4 * 2**30
"""A larger file begins only for a single tensor that is larger itself."""
HIDDEN = ".converting"
INDEX = "model.safetensors.index.json"


def size_of(tensor: LazyTensor) -> int:
    """Its bytes."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def read_safetensors(path: str | os.PathLike) -> dict[str, LazyTensor]:
    """The tensors of one file. Only its header is read now; every place that it names is checked.

    Raises:
        CheckpointDamagedError: no safetensors file, or one that ends early; the tensor is named.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or not 2 <= length <= min(total - 8, MAX_HEADER_BYTES):
                raise CheckpointDamagedError(f"{path}: truncated, or no safetensors file ({total} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointDamagedError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointDamagedError(f"{path}: its safetensors header is not JSON ({error})") from None
    found: dict[str, LazyTensor] = {}
    for name, entry in header.items() if isinstance(header, dict) else ():
        if name != "__metadata__":
            found[name] = _entry(path, name, entry, 8 + length, total)
    return found


def _entry(path: Path, name: str, entry: Any, origin: int, total: int) -> LazyTensor:
    try:
        shape, dtype = tuple(int(n) for n in entry["shape"]), DTYPES[entry["dtype"]]
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamagedError(f"{path}: the entry of tensor {name} is malformed ({error!r:.80})") from None
    if begin < 0 or min(shape, default=1) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointDamagedError(f"{path}: the entry of tensor {name} is malformed: {str(entry):.120}")
    if origin + end > total:
        raise CheckpointDamagedError(
            f"{path}: truncated: tensor {name} would end at byte {origin + end}, the file has {total}"
        )

    def read() -> Tensor:
        return read_part(begin, end, shape)

    def read_rows(start: int, stop: int) -> Tensor:
        row = math.prod(shape[1:]) * dtype.itemsize
        return read_part(begin + start * row, begin + stop * row, (stop - start, *shape[1:]))

    def read_part(begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
        values = torch.empty(shape, dtype=dtype)  # not a bytearray, which the system would fill with zeros first
        with open(path, "rb", buffering=0) as file:
            file.seek(origin + begin)
            view, done = memoryview(values.view(-1).view(torch.uint8).numpy()), 0  # type: ignore[arg-type]
            while done < len(view):
                if not (count := file.readinto(view[done:])):
                    raise CheckpointDamagedError(f"{path}: ends early, in tensor {name}")
                done += count
        return values

    return LazyTensor(shape, dtype, read, read_rows)


def in_files(tensors: Mapping[str, LazyTensor], max_bytes: int = MAX_FILE_BYTES) -> list[dict[str, LazyTensor]]:
    """``tensors`` in their order, in groups of at most ``max_bytes``, or of one tensor."""
    groups: list[dict[str, LazyTensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if groups[-1] and held + size_of(tensor) > max_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = tensor
        held += size_of(tensor)
    # wide elements first: every tensor of a file then begins at a multiple of its element's size
    return [dict(sorted(group.items(), key=lambda item: -item[1].dtype.itemsize)) for group in groups if group]


def read_shards(
    index: Path, read: Callable[[Path], dict[str, LazyTensor]] = read_safetensors
) -> dict[str, LazyTensor]:  # fmt: skip
    """The tensors that ``index`` names, of files that hold these and no others.

    Raises:
        CheckpointDamagedError: a file or tensor is missing, left over, or not one of that folder.
    """
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointDamagedError(f"{index}: weight_map is not a table of files")
    found: dict[str, LazyTensor] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise CheckpointDamagedError(f"{index}: refuses the file name {file!r:.80}: only names without a folder")
        path, here = index.parent / file, {name for name, home in names.items() if home == file}
        if not path.is_file():
            raise CheckpointDamagedError(f"{index.parent}: {file} is missing, which holds {listed(sorted(here))}")
        shard = read(path)
        if missing := sorted(here - shard.keys()):
            raise CheckpointDamagedError(f"{path}: lacks what {index.name} says that it holds: {listed(missing)}")
        if foreign := sorted(shard.keys() - here):
            raise CheckpointDamagedError(f"{path}: holds what {index.name} does not name: {listed(foreign)}")
        found |= shard
    return found


class Target:
    """The folder that a conversion makes; a context manager that frees its lock. What is written to ``folder`` appears
    under the final name with :meth:`publish`, all at once.

    Args:
        final: a name that nothing, or an empty folder, has.
        identity: JSON that says what is converted: the same conversion, repeated, goes on; what another one left behind
            is removed. None: nothing of a failed attempt is kept.

    Raises:
        CheckpointError: ``final`` exists, or another process is making it.
    """

    def __init__(self, final: str | os.PathLike, identity: Any = None) -> None:
        self.final = Path(os.path.abspath(final))
        self.folder = self.final.with_name(f".{self.final.name}{HIDDEN}")
        self._path = self.folder.with_name(f"{self.folder.name}.journal")
        self._check_final()
        try:
            self.final.parent.mkdir(parents=True, exist_ok=True)
            self._journal = open(self._path, "a+b")  # noqa: SIM115  # its lock lasts as long as this object
            fcntl.lockf(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if not self._path.exists() or not os.access(self._path, os.W_OK):
                raise CheckpointWriteError(f"{self.final}: its folder cannot be written") from None
            raise CheckpointError(f"{self.final}: another process is making it; wait for it, or stop it") from None
        except OSError as error:
            raise CheckpointWriteError(f"{self.final}: cannot be made ({error.strerror})") from error
        self.done: dict[str, dict[str, Any]] = {}
        self._identity = json.loads(json.dumps(identity))
        self._resume(self._identity)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._identity is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._path.unlink(missing_ok=True)
        self._journal.close()

    def _check_final(self) -> None:
        empty = self.final.is_dir() and not any(self.final.iterdir())
        if os.path.lexists(self.final) and not empty:
            raise CheckpointError(f"{self.final}: exists already; choose another name, or remove it")

    def _resume(self, identity: Any) -> None:
        """Keep what an earlier attempt at the same conversion completed."""
        self._journal.seek(0)
        lines: list[Any] = []
        for line in self._journal.read().splitlines():
            with suppress(ValueError):  # the last one of a process that was killed
                lines.append(json.loads(line))
        if identity is not None and lines and lines[0] == identity and self.folder.is_dir():
            self.done = {name: entry for name, entry in lines[1:] if self._matches(name, entry)}
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.rglob("*"):
            if path.is_file() and str(path.relative_to(self.folder)) not in self.done:
                path.unlink()
        self._journal.truncate(0)
        self._append(identity)
        for item in self.done.items():
            self._append(item)

    def _append(self, value: Any) -> None:
        self._journal.write(json.dumps(value).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _matches(self, name: str, entry: dict[str, Any]) -> bool:
        """Whether a file still has the bytes that the journal tells of."""
        try:
            with open(self.folder / name, "rb") as file:
                right = os.fstat(file.fileno()).st_size == entry["bytes"]
                right = right and zlib.crc32(file.read(entry["header_bytes"])) == entry["header_crc32"]
                starts = [*(start for start, _ in entry["tensors"].values()), entry["bytes"]]
                for (_, blocks), start, end in zip(entry["tensors"].values(), starts, starts[1:]):
                    sizes = [min(BLOCK_BYTES, end - at) for at in range(start, end, BLOCK_BYTES)]
                    right = right and [zlib.crc32(file.read(size)) for size in sizes] == blocks
                return right
        except OSError:
            return False

    def write(self, name: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> dict[str, Any]:
        """The safetensors file ``name`` (a path below the folder) of ``tensors``, which are read one at a time; what
        the journal keeps of it: ``bytes``, ``header_bytes``, ``header_crc32``, and for each of ``tensors`` ``[start,
        [crc32 of its blocks]]``. A complete file of an earlier attempt is left as it is."""
        if name in self.done:
            return self.done[name]
        kinds = ((key, tensor.dtype, tensor.shape) for key, tensor in tensors.items())
        header, starts = safetensors_header(kinds, metadata)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(header)
            blocks = {key: [start, list(_write(file, key, tensors[key]))] for key, start in zip(tensors, starts)}
            file.flush()
            os.fsync(file.fileno())
            sizes = {"bytes": file.tell(), "header_bytes": len(header), "header_crc32": zlib.crc32(header)}
        entry = {**sizes, "tensors": blocks}
        fsync_path(path.parent)
        self.done[name] = entry
        self._append([name, entry])
        return entry

    def write_shards(self, tensors: Mapping[str, LazyTensor], max_bytes: int = MAX_FILE_BYTES) -> None:
        """``model.safetensors``, or files of bounded size and their index."""
        shards, names = in_files(tensors, max_bytes), dict[str, str]()
        for number, shard in enumerate(shards, 1):
            several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = several if len(shards) > 1 else "model.safetensors"
            self.write(file, shard, {"format": "pt"})
            names |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(size_of(tensor) for tensor in tensors.values())
            self.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))})

    def write_json(self, name: str, value: Any) -> None:
        """The file ``name``, indented."""
        write_file(self.folder / name, json.dumps(value, indent=2).encode() + b"\n")

    def publish(self) -> None:
        """Gives the folder its final name."""
        self._check_final()
        for path in [*self.folder.rglob("*"), self.folder]:
            fsync_path(path)
        os.rename(self.folder, self.final)
        fsync_path(self.final.parent)
        self._path.unlink()


def _write(file: BinaryIO, name: str, tensor: LazyTensor) -> Iterator[int]:
    """Appends the bytes of a tensor; the crc32 of each of its blocks."""
    values = tensor.read()
    if tuple(values.shape) != tuple(tensor.shape) or values.dtype != tensor.dtype:
        raise CheckpointError(
            f"{name}: read as {values.dtype} {list(values.shape)}, announced as {tensor.dtype} {list(tensor.shape)}"
        )
    for block in host_blocks(values):
        file.write(block)
        yield zlib.crc32(block)
