"""Lazy reading of ``torch.save`` files, also inside a larger file: only the pickle is read at first.

In the zip format (since torch 1.6), every storage is an uncompressed record with a CRC-32, which is checked on the
record's first read. The legacy format is a sequence of pickles followed by the storages, without checksums."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.safe_files import open_regular
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.unpickler import Record, Storage, StoredTensor, unpickle

MAX_PICKLE_BYTES = 2**26
"""Maximum pickle size (hundreds of bytes per tensor); parsing takes up to 100 times its size in work and memory."""
CHUNK_BYTES = 2**22
_ZIP_MAGIC, _OLD_MAGIC = b"PK\x03\x04", 0x1950A86A20F9469CFC6C
_OLD_PROTOCOL = 1001
_HEADER_BYTES = 30
"""Size of a zip record's header, without its name."""


class _Range:
    """File object for ``zipfile`` over ``length`` bytes of a file from ``start``; reads never allocate more bytes."""

    def __init__(self, path: Path, start: int, length: int | None) -> None:
        """``length`` None: up to the end of the file. Raises CheckpointDamagedError if the range exceeds it."""
        self.path, self.start, self.at = path, start, 0
        self._file = open_regular(path, buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        self.length = size - start if length is None else length
        if not 0 <= start <= start + self.length <= size:
            self._file.close()
            raise CheckpointDamagedError(f"{path}: ends early: {start + self.length} bytes are expected")

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, offset + (0, self.at, self.length)[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self.length - self.at)
        data = bytearray(left if count < 0 else min(count, left))
        self.read_into(memoryview(data), self.at)
        self.at += len(data)
        return bytes(data)

    def read_into(self, view: memoryview, at: int) -> None:
        """Fill ``view`` with the bytes from offset ``at``; raise CheckpointDamagedError past the end."""
        if at < 0 or at + len(view) > self.length:
            raise CheckpointDamagedError(f"{self.path}: ends early")
        self._file.seek(self.start + at)
        while view:
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointDamagedError(f"{self.path}: ends early")
            view = view[count:]

    def close(self) -> None:
        self._file.close()


@dataclass
class _Record:
    path: Path
    name: str
    range: tuple[int, int | None]
    """Start and length of the archive in the file; ``position`` is relative to this start."""
    position: int
    """Offset of the record's header; in the legacy format, offset of its bytes."""
    num_bytes: int
    crc32: int | None = None
    """CRC-32 to check on the first read; None after the check, or without checksums."""
    has_header: bool = True

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Read bytes ``begin`` to ``end`` (default: the end) as uint8 [end - begin]; opens the file per call.

        The first call reads the full record to check its CRC-32, if one was written; later calls read only the range.
        Raises CheckpointDamagedError if the record is truncated or its checksum differs."""
        end = self.num_bytes if end is None else end
        with closing(_Range(self.path, *self.range)) as file:
            origin = self.position + (self._header_bytes(file) if self.has_header else 0)
            if origin + self.num_bytes > file.length:
                raise CheckpointDamagedError(f"{self.path}: ends early, in its record {self.name}")
            values = torch.empty(end - begin, dtype=torch.uint8)
            view = memoryview(values.numpy())  # type: ignore[arg-type]
            if self.crc32 is None:
                file.read_into(view, origin + begin)
                return values
            # bytes before and after the range are read only for the checksum
            places = chain(_scratch(0, begin), _parts(view, begin), _scratch(end, self.num_bytes))
            checksum = _checksum(file, ((buffer, origin + at) for buffer, at in places), self.num_bytes)
        if checksum != self.crc32:
            raise CheckpointDamagedError(
                f"{self.path}: damaged: its record {self.name} does not have the CRC-32 that was written with it"
            )
        self.crc32 = None
        return values

    def _header_bytes(self, file: _Range) -> int:
        """Return the size in bytes of the record's local zip header."""
        header = bytearray(_HEADER_BYTES)
        file.read_into(memoryview(header), self.position)
        if header[:4] != _ZIP_MAGIC:
            raise CheckpointDamagedError(f"{self.path}: damaged: no record {self.name} at byte {self.position}")
        name, extra = struct.unpack("<HH", header[26:30])
        return _HEADER_BYTES + name + extra


def _checksum(file: _Range, places: Iterable[tuple[memoryview, int]], num_bytes: int) -> int:
    """Fill each buffer, while a thread computes the CRC-32 of the previous one."""
    checksum = 0
    if num_bytes <= CHUNK_BYTES:
        for buffer, at in places:
            file.read_into(buffer, at)
            checksum = zlib.crc32(buffer, checksum)
        return checksum
    with ThreadPoolExecutor(1, "crc32") as pool:
        last = pool.submit(int)
        for buffer, at in places:
            file.read_into(buffer, at)
            last = pool.submit(zlib.crc32, buffer, last.result())
        return last.result()


def _parts(view: memoryview, start: int) -> Iterator[tuple[memoryview, int]]:
    for at in range(0, len(view), CHUNK_BYTES):
        yield view[at : at + CHUNK_BYTES], start + at


def _scratch(begin: int, end: int) -> Iterator[tuple[memoryview, int]]:
    """Yield two alternating buffers for bytes ``begin`` to ``end``: one is filled while the other is checksummed."""
    buffers = [bytearray(min(CHUNK_BYTES, end - begin)) for _ in range(2)]
    for number, at in enumerate(range(begin, end, CHUNK_BYTES)):
        yield memoryview(buffers[number % 2])[: end - at], at


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Read a ``torch.save`` file at ``start``; return plain data in which tensors are :class:`LazyTensor`. Raises
    CheckpointError: the file is missing, not regular, truncated, damaged or not from ``torch.save``, or its pickle
    requests more than data. Reading a lazy tensor can raise it, too."""
    try:
        with closing(_Range(path, start, length)) as file:
            first = file.read(4)
            file.seek(0)
            read = _read_zip if first == _ZIP_MAGIC else _read_old
            value, records = read(file)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{path}: is missing") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointDamagedError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # zipfile has an exception for each field of a crafted directory
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointDamagedError(f"{path}: damaged: not a complete file of torch.save ({reason:.120})") from None
    return _with_lazy_tensors(value, path, records)


def _read_zip(file: _Range) -> tuple[object, dict[str, _Record]]:
    """Return (the unpickled value, records by storage key) of a zip file of ``torch.save``. Raises
    CheckpointDamagedError for compressed, encrypted or repeated records, another byte order, not exactly one data.pkl
    or one above MAX_PICKLE_BYTES; errors of zipfile and of the unpickler pass. Whether storages have records is checked
    when their tensors are made (:func:`_lazy`)."""
    records: dict[str, _Record] = {}
    with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
        entries = archive.infolist()
        has_checksums = any(entry.CRC for entry in entries)  # set_crc32_options(False) leaves zeros
        for entry in entries:
            stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
            if not stored or entry.flag_bits & 1 or entry.filename in records:
                reason = "there twice" if entry.filename in records else "compressed or encrypted"
                raise CheckpointDamagedError(f"{file.path}: its record {entry.filename!r:.80} is {reason}")
            records[entry.filename] = _Record(
                file.path,
                entry.filename,
                (file.start, file.length),
                entry.header_offset,
                entry.file_size,
                entry.CRC if has_checksums else None,
            )
    names = [name for name in records if name.endswith("/data.pkl")]
    if len(names) != 1:
        raise CheckpointDamagedError(f"{file.path}: not a file of torch.save (no data.pkl)")
    prefix = names[0][: -len("data.pkl")]
    order = records.get(f"{prefix}byteorder")
    if order is not None and (order.num_bytes != len("little") or order.read().numpy().tobytes() != b"little"):
        raise CheckpointDamagedError(f"{file.path}: numbers of another byte order")
    structure = records[names[0]]
    if structure.num_bytes > MAX_PICKLE_BYTES:
        raise CheckpointDamagedError(f"{file.path}: its data.pkl has {structure.num_bytes} bytes, too many to be read")
    data = structure.read().numpy().tobytes()
    value = unpickle(io.BytesIO(data), len(data), str(file.path))
    start = f"{prefix}data/"
    return value, {name.removeprefix(start): record for name, record in records.items() if name.startswith(start)}


def _read_old(file: _Range) -> tuple[object, dict[str, _Record]]:
    """Return (the unpickled value, records by storage key) of a file in the legacy format: pickles of magic number,
    version, system info, value and storage keys; then per key an int64 element count and the bytes, without checksums.
    Raises CheckpointDamagedError for another file."""
    source, where = io.BytesIO(file.read(min(file.length, MAX_PICKLE_BYTES))), str(file.path)
    size = len(source.getbuffer())
    try:
        has_header = [unpickle(source, size, where) for _ in range(2)] == [_OLD_MAGIC, _OLD_PROTOCOL]
    except CheckpointError:
        has_header = False
    if not has_header:
        raise CheckpointDamagedError(f"{where}: not a file of torch.save, or damaged at its start")
    storages: dict[str, Storage] = {}
    system, value, keys = (unpickle(source, size, where, storages) for _ in range(3))
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointDamagedError(f"{where}: numbers of another byte order")
    if not isinstance(keys, list) or len(keys) != len(storages) or not all(key in storages for key in keys):
        raise CheckpointDamagedError(f"{where}: its list of storages does not match its tensors")
    records: dict[str, _Record] = {}
    at = source.tell()
    for key in keys:
        file.seek(at)
        count, storage = int.from_bytes(file.read(8), "little"), storages[key]
        num_bytes = count * storage.dtype.itemsize
        if count != storage.numel or at + 8 + num_bytes > file.length:
            raise CheckpointDamagedError(f"{where}: ends early, or is damaged at its storage {key!r:.40}")
        records[key] = _Record(file.path, key, (file.start, file.length), at + 8, num_bytes, has_header=False)
        at += 8 + num_bytes
    return value, records


def _with_lazy_tensors(value: object, path: Path, records: Mapping[str, _Record]) -> object:
    """Replace tensors in place; tuples become lists. One tensor in two places stays one; cycles are allowed."""
    lazy_tensors: dict[int, LazyTensor] = {}
    alive: list[object] = []  # keep references: an id is unique only while its object exists

    def swap(item: object) -> object:
        if isinstance(item, StoredTensor):
            if id(item) not in lazy_tensors:
                lazy_tensors[id(item)] = _lazy(item, path, records)
                alive.append(item)
            return lazy_tensors[id(item)]
        if isinstance(item, tuple):  # may contain tensors: a list can be filled later
            item = list(item)
        if isinstance(item, list | dict | Record):
            todo.append(item)
        return item

    todo: list[Any] = []
    visited: set[int] = set()
    root = swap(value)
    while todo:
        item = todo.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        alive.append(item)
        if isinstance(item, list):
            item[:] = [swap(element) for element in item]
        else:
            table = item.attributes if isinstance(item, Record) else item
            for key in table:
                table[key] = swap(table[key])
    return root


def _lazy(tensor: StoredTensor, path: Path, records: Mapping[str, _Record]) -> LazyTensor:
    """Raises CheckpointDamagedError if the storage's record is missing or too small."""
    storage = tensor.storage
    record, expected = records.get(storage.key), storage.numel * storage.dtype.itemsize
    if record is None or record.num_bytes < expected:
        raise CheckpointDamagedError(f"{path}: the record data/{storage.key!s:.40} of {expected} bytes is not there")

    def read_rows(start: int, stop: int) -> Tensor:
        rows = replace(tensor, offset=tensor.offset + start * tensor.stride[0], shape=(stop - start, *tensor.shape[1:]))
        return _read(rows, record)

    return LazyTensor(tensor.shape, storage.dtype, partial(_read, tensor, record), read_rows if tensor.shape else None)


def _read(tensor: StoredTensor, record: _Record) -> Tensor:
    """Read only the byte range that ``tensor`` spans; return a strided view of it."""
    dtype = tensor.storage.dtype
    if 0 in tensor.shape:
        return torch.empty(tensor.shape, dtype=dtype)
    count = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride))
    begin = tensor.offset * dtype.itemsize
    data = record.read(begin, begin + count * dtype.itemsize)
    return data.view(dtype).as_strided(tensor.shape, tensor.stride)
