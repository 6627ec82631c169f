"""Reader of tensor shards (rectangles) from a checkpoint directory, independent of the layout that wrote it.

A rank reads only the blocks that it needs and checks each block's CRC-32 before use. Files are opened by plain name
inside the directory, never through a symbolic link."""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.config.errors import counted, listed
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.exchange import all_ranks, together
from megatron.core.dist_checkpointing.files import MAX_ASSET_BYTES, read_regular_file
from megatron.core.dist_checkpointing.manifest import BLOCK_BYTES, Chunk, chunk_rectangle, read_manifest
from megatron.core.groups.process_groups import Group
from megatron.core.safe_files import open_regular
from megatron.core.sharding.rectangles import Rectangle
from megatron.core.sharding.sharded_tensor import DTYPE_NAMES, DTYPES, ShardedTensor


def load(
    sharded_state_dict: Mapping[str, ShardedTensor],
    checkpoint_dir: str | os.PathLike,
    *,
    allow_unused: Iterable[str] = (),
    group: Group | None = None,
) -> dict[str, Tensor]:
    """Fill the local tensors of ``sharded_state_dict`` in place (cast to their dtype); return them by key. Collective
    over ``group`` (default: the world). ``allow_unused``: name prefixes of stored tensors that no rank must request.
    CheckpointError lists damage, missing or unused names, wrong shapes; names and shapes are checked before any tensor
    is modified, damage found while reading raises with some tensors filled."""
    group = group or all_ranks()
    return load_from(together_reader(checkpoint_dir, group), sharded_state_dict, allow_unused=allow_unused, group=group)


def load_from(
    reader: Source, sharded_state_dict: Mapping[str, ShardedTensor], *, allow_unused: Iterable[str] = (), group: Group
) -> dict[str, Tensor]:
    """Fill the local tensors of ``sharded_state_dict`` in place from an opened source and return them by key, with the
    checks and errors of :func:`load`: nothing is filled unless names and shapes match on all ranks. Collective over
    ``group``: three exchanges (names, problems, end). Several threads call ``reader.read_into``."""
    names = sorted({tensor.name for tensor in sharded_state_dict.values()})
    requests = together(lambda: names, group)

    def check() -> None:
        problems = reader.misfits(sharded_state_dict.values())
        everyone = set().union(*requests)
        allowed = tuple(allow_unused)
        unused = [name for name in reader.names if name not in everyone and not name.startswith(allowed)]
        problems += [f"{name} is stored but not used" for name in unused]
        if problems:
            first = listed(problems, "; ", 40)
            raise CheckpointError(f"{reader.directory} does not fit ({counted(len(problems), 'problem')}): {first}")

    together(check, group)

    def fill() -> None:
        # threads help: checksums, reads and copies release the GIL
        with ThreadPoolExecutor(reader.num_threads) as pool:
            # weights first: main parameters may share their memory (bf16 weight plus remainder) and must be read later
            for _, tensors in groupby(sharded_state_dict.values(), lambda tensor: tensor.name.split(".")[0]):
                list(pool.map(reader.read_into, tensors))

    together(fill, group)
    return {key: tensor.local for key, tensor in sharded_state_dict.items()}


def misfits(stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]], requested: Iterable[ShardedTensor]) -> list[str]:
    """Return a message for each requested tensor that is not in ``stored`` (name -> shape, dtype), has another global
    shape, or is floating-point where the stored one is not or vice versa. Other dtypes may differ."""
    problems = []
    for tensor in requested:
        shape, dtype = stored.get(tensor.name, (None, tensor.local.dtype))
        if shape is None:
            problems.append(f"{tensor.name} is missing")
        elif shape != tuple(tensor.global_shape):
            problems.append(f"{tensor.name} has shape {list(shape)}, expected {list(tensor.global_shape)}")
        elif dtype.is_floating_point != tensor.local.dtype.is_floating_point:
            problems.append(f"{tensor.name} holds {DTYPE_NAMES[dtype]}, expected {tensor.local.dtype}")
    return problems


class Source(Protocol):
    """Interface of the sources of :func:`load_from`: a checkpoint, or the tensors of another format."""

    directory: Path
    num_threads: int
    """Number of threads that may call :meth:`read_into` concurrently."""

    @property
    def names(self) -> list[str]: ...
    def misfits(self, tensors: Iterable[ShardedTensor]) -> list[str]: ...
    def read_into(self, tensor: ShardedTensor) -> None: ...


def together_reader(checkpoint_dir: str | os.PathLike, group: Group) -> CheckpointReader:
    """Open the checkpoint on every rank. Collective over ``group``; if one rank fails, all raise CheckpointError."""
    readers: list[CheckpointReader] = []
    together(lambda: readers.append(CheckpointReader(checkpoint_dir)), group)
    return readers[0]


class _OfThread(threading.local):
    buffer: Tensor | None = None


class CheckpointReader:
    """Reader of one checkpoint directory (``…/iter_0001000``); needs no process group. Opening checks the manifest and
    that all files exist with the right size, but no tensor data; CheckpointDamagedError otherwise."""

    num_threads = 4

    def __init__(self, checkpoint_dir: str | os.PathLike) -> None:
        self.directory = Path(checkpoint_dir)
        self.manifest = read_manifest(self.directory)
        self.objects: dict[str, Any] = self.manifest["objects"]
        self._checked_headers: set[str] = set()
        self._thread = _OfThread()

    @property
    def names(self) -> list[str]:
        """Sorted names of the stored tensors."""
        return sorted(self.manifest["tensors"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a stored tensor."""
        return tuple(self.manifest["tensors"][name]["shape"])

    def misfits(self, tensors: Iterable[ShardedTensor]) -> list[str]:
        """Describe the ``tensors`` that are not stored or do not match; see :func:`misfits`."""
        entries = self.manifest["tensors"].items()
        return misfits({name: (tuple(entry["shape"]), DTYPES[entry["dtype"]]) for name, entry in entries}, tensors)

    def read(self, name: str) -> Tensor:
        """Read a full global tensor on the CPU. CheckpointDamagedError for damage, KeyError for an unknown name."""
        entry = self.manifest["tensors"][name]
        full = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        self.read_into(ShardedTensor(name, full, tuple(entry["shape"]), (0,) * full.ndim))
        return full

    @torch.no_grad()
    def read_into(self, tensor: ShardedTensor) -> None:
        """Fill ``tensor.local`` in place from the chunks that intersect it, cast to its dtype; waits for copies to a
        GPU. Does not compare the global shape (see :meth:`misfits`). Several threads may call it. KeyError for a name
        that is not stored. CheckpointDamagedError for a wrong checksum, a truncated file, or missing chunks."""
        entry = self.manifest["tensors"][tensor.name]
        dtype = DTYPES[entry["dtype"]]
        filled = 0
        for chunk in entry["chunks"]:
            overlap = chunk_rectangle(chunk).intersect(tensor.rectangle)
            if overlap is not None:
                self._read_chunk(tensor.name, chunk, dtype, overlap, overlap.of(tensor.local.detach(), tensor.offsets))
                filled += overlap.numel
        if filled != tensor.local.numel():
            raise CheckpointDamagedError(f"{self.directory}: {tensor.name} is stored only in part")

    def _read_chunk(self, name: str, chunk: Chunk, dtype: torch.dtype, rectangle: Rectangle, target: Tensor) -> None:
        """Copy ``rectangle`` (global coordinates, inside ``chunk``) to ``target``, cast to its dtype; some rows at a
        time. Checks the CRC-32 of the header (once) and of every block read; CheckpointDamagedError."""
        self._check_header(chunk["file"])
        if target.ndim == 0:
            target.copy_(self._rows(name, chunk, dtype, 0, 1).reshape(()))
            return
        row_bytes = max(math.prod(chunk["shape"][1:]) * dtype.itemsize, 1)
        first = rectangle.offsets[0] - chunk["offsets"][0]
        rows_at_once = max(2 * BLOCK_BYTES // row_bytes, 1)
        for start in range(0, rectangle.lengths[0], rows_at_once):
            count = min(rows_at_once, rectangle.lengths[0] - start)
            rows = self._rows(name, chunk, dtype, first + start, count)
            for dim in range(1, rows.ndim):
                rows = rows.narrow(dim, rectangle.offsets[dim] - chunk["offsets"][dim], rectangle.lengths[dim])
            # blocking: ``rows`` is this thread's buffer, which the next read overwrites
            target[start : start + count].copy_(rows)

    def _rows(self, name: str, chunk: Chunk, dtype: torch.dtype, first: int, count: int) -> Tensor:
        """Return full rows of a chunk in the stored ``dtype``, valid until this thread's next call. Raises
        CheckpointDamagedError if the CRC-32 of a block differs. A 0-d chunk has one row."""
        row_shape = chunk["shape"][1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        total = math.prod(chunk["shape"]) * dtype.itemsize
        begin, end = first * row_bytes, (first + count) * row_bytes
        first_block, last_block = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        data = self._buffer(min(last_block * BLOCK_BYTES, total) - first_block * BLOCK_BYTES)
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        self._read_at(chunk["file"], chunk["start"] + first_block * BLOCK_BYTES, view)
        for block in range(first_block, last_block):
            at = (block - first_block) * BLOCK_BYTES
            if zlib.crc32(view[at : at + BLOCK_BYTES]) != chunk["crc32"][block]:
                path = self.directory / chunk["file"]
                raise CheckpointDamagedError(f"{path}: {name} is damaged (its checksum does not match)")
        begin -= first_block * BLOCK_BYTES
        return data[begin : begin + count * row_bytes].view(dtype).view(count, *row_shape)

    def _buffer(self, size: int) -> Tensor:
        """Reused per thread: page faults of new memory would cost as much as reading into it."""
        if self._thread.buffer is None or self._thread.buffer.numel() < size:
            self._thread.buffer = torch.empty(size, dtype=torch.uint8)
        return self._thread.buffer[:size]

    def _check_header(self, file: str) -> None:
        """Check the CRC-32 of a header, once per file: other safetensors readers rely on it."""
        if file in self._checked_headers:
            return
        entry = self.manifest["files"][file]
        header = bytearray(entry["header_bytes"])
        self._read_at(file, 0, memoryview(header))
        if zlib.crc32(header) != entry["header_crc32"]:
            raise CheckpointDamagedError(f"{self.directory / file}: its header is damaged or from another checkpoint")
        self._checked_headers.add(file)

    def _read_at(self, file: str, position: int, view: memoryview) -> None:
        """Regular files only, no links. CheckpointDamagedError if it cannot be read or ends early."""
        path = self.directory / file
        try:
            with open_regular(path, follow=False, buffering=0) as stream:
                stream.seek(position)
                position_in_view = 0
                while position_in_view < len(view):
                    count = stream.readinto(view[position_in_view:])  # type: ignore[attr-defined]
                    if not count:
                        raise CheckpointDamagedError(f"{path}: ends early")
                    position_in_view += count
        except OSError as error:
            raise CheckpointDamagedError(f"{path}: cannot be read ({error.strerror})") from error

    def verify_assets(self) -> list[str]:
        """Return a message for each copied file (asset) that is missing, unreadable or has another CRC-32."""
        problems = []
        for name, entry in self.manifest["assets"].items():
            try:
                intact = zlib.crc32(read_regular_file(self.directory / name, MAX_ASSET_BYTES)) == entry["crc32"]
            except (OSError, CheckpointError):
                intact = False
            if not intact:
                problems.append(f"{self.directory / name} is damaged or missing")
        return problems

    def verify(self) -> None:
        """Raise ``CheckpointDamagedError`` with the first damage of each tensor and asset. One at a time."""
        problems = self.verify_assets()
        for name in self.names:
            try:
                self.read(name)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointDamagedError("; ".join(dict.fromkeys(problems)))
