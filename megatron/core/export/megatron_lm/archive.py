"""Files of ``torch.save``, whole or as a stretch of a larger file: the pickle is read, tensors stay where they are.

Only the zip form (torch 1.6, 2020) is read: it has every storage as bytes at an offset.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.export.megatron_lm.unpickler import MAX_PICKLE_BYTES, Record, StoredTensor, unpickle
from megatron.core.sharding.lazy_tensor import LazyTensor


class _Stretch(io.RawIOBase):
    """``length`` bytes of a file from ``start`` as a file of their own."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # lasts as long as this object
        self.start, self.length, self.at = start, length, 0
        if start + length > os.fstat(self._file.fileno()).st_size:
            self._file.close()
            raise CheckpointDamagedError(f"{path}: ends early: {start + length} bytes are expected")

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, offset + (0, self.at, self.length)[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self.at)]
        self._file.seek(self.start + self.at)
        count = self._file.readinto(view) or 0
        self.at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def read_archive(path: Path, start: int = 0, length: int | None = None) -> Any:
    """What was saved: plain data in which tensors are :class:`LazyTensor`.

    Raises:
        CheckpointError: missing, truncated, not of ``torch.save``, or its pickle asks for anything but data.
    """
    try:
        size = path.stat().st_size if length is None else length
        with _Stretch(path, start, size) as stretch, zipfile.ZipFile(io.BufferedReader(stretch)) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            names = [name for name in entries if name.endswith("/data.pkl")]
            if len(names) != 1 or entries[names[0]].file_size > MAX_PICKLE_BYTES:
                raise CheckpointDamagedError(f"{path}: not a file of torch.save (no data.pkl)")
            prefix = names[0][: -len("data.pkl")]
            if f"{prefix}byteorder" in entries and archive.read(f"{prefix}byteorder") != b"little":
                raise CheckpointDamagedError(f"{path}: numbers of another byte order")
            value = unpickle(archive.read(names[0]), str(path))
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{path}: is missing") from None
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        old = ": written by torch before 1.6, or damaged; load it there and save it again"
        raise CheckpointDamagedError(f"{path}: not a complete zip file of torch.save{old} ({error})") from None
    return _located(value, path, start, {name[len(prefix) :]: entry for name, entry in entries.items()})


def _located(value: Any, path: Path, start: int, entries: dict[str, zipfile.ZipInfo]) -> Any:
    """``value`` with a :class:`LazyTensor` for every stored one; iterative, as nesting has no bound."""
    found: dict[int, LazyTensor] = {}
    alive: list[Any] = []  # ids are only unique among the living

    def swap(item: Any) -> Any:
        if isinstance(item, StoredTensor):
            if id(item) not in found:
                found[id(item)] = _lazy(item, path, start, entries)
                alive.append(item)
            return found[id(item)]
        if isinstance(item, tuple):  # may hold tensors: a list in its place can be filled later
            item = list(item)
        if isinstance(item, list | dict | Record):
            todo.append(item)
        return item

    todo: list[Any] = []
    done: set[int] = set()
    root = swap(value)
    while todo:
        item = todo.pop()
        if id(item) in done:
            continue
        done.add(id(item))
        alive.append(item)
        if isinstance(item, list):
            item[:] = [swap(each) for each in item]
        else:
            table = item.attributes if isinstance(item, Record) else item
            for key in table:
                table[key] = swap(table[key])
    return root


def _lazy(tensor: StoredTensor, path: Path, start: int, entries: dict[str, zipfile.ZipInfo]) -> LazyTensor:
    storage = tensor.storage
    entry, dtype = entries.get(f"data/{storage.key}"), storage.dtype
    expected = storage.numel * dtype.itemsize
    if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size < expected:
        raise CheckpointDamagedError(f"{path}: the record data/{storage.key!s:.40} of {expected} bytes is not there")
    return LazyTensor(tensor.shape, dtype, partial(_read, tensor, path, start + entry.header_offset))


def _read(tensor: StoredTensor, path: Path, header: int) -> Tensor:
    """The numbers between the first and the last element of ``tensor``, from the record whose header is there."""
    dtype = tensor.storage.dtype
    if 0 in tensor.shape:
        return torch.empty(tensor.shape, dtype=dtype)
    count = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride))
    with open(path, "rb") as file:
        file.seek(header)
        fixed = file.read(30)
        if len(fixed) != 30 or fixed[:4] != b"PK\x03\x04":
            raise CheckpointDamagedError(f"{path}: damaged: no record at byte {header}")
        name, extra = struct.unpack("<HH", fixed[26:30])
        file.seek(header + 30 + name + extra + tensor.offset * dtype.itemsize)
        data = bytearray(count * dtype.itemsize)
        if file.readinto(data) != len(data):
            raise CheckpointDamagedError(f"{path}: ends early")
    return torch.frombuffer(data, dtype=dtype).as_strided(tensor.shape, tensor.stride)
