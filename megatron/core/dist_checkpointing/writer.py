"""Write one directory of sharded tensors, collectively on all ranks.

Every rank writes separate safetensors files, streamed in blocks so that staging stays small. A shard that several ranks
hold is written once, by the rank with the least to write so far. All files go into a hidden directory next to the final
one; files and directories are fsynced, rank 0 adds the manifest, and one rename makes it a checkpoint. A write error on
any rank raises on all ranks and leaves no files.

``save`` is ``plan``, which uses the tensors, then ``write``, which gets their bytes from ``blocks``: a background save
runs ``write`` in another thread, over a separate group, on blocks that ``staging.py`` has copied to the host."""

from __future__ import annotations

import json
import math
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypedDict

import numpy as np
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointError, CheckpointWriteError
from megatron.core.dist_checkpointing.exchange import all_gather_json, all_ranks, from_first_rank, together
from megatron.core.dist_checkpointing.files import MAX_ASSET_BYTES
from megatron.core.dist_checkpointing.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    AssetEntry,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    check_coverage,
    encode,
)
from megatron.core.groups.process_groups import Group
from megatron.core.safe_files import fsync_path, read_file, remove
from megatron.core.sharding.sharded_tensor import DTYPE_NAMES, ShardedTensor

Fault = Callable[[str], None]
"""Hook called with the name of each phase boundary; tests kill the process there."""

Blocks = Callable[[Tensor], Iterator[memoryview]]
"""Function that yields the bytes of a tensor in blocks of ``BLOCK_BYTES``; a block is valid until the next one."""

Key = tuple[str, tuple[int, ...]]

TEMPORARY = ".tmp-"
REPLACED = ".old"


def no_fault(phase: str) -> None:
    """Do nothing: the fault hook of regular runs."""


def save(
    sharded_state_dict: Mapping[str, ShardedTensor],
    checkpoint_dir: str | os.PathLike,
    *,
    objects: dict[str, object] | None = None,
    assets: Mapping[str, str | os.PathLike] | None = None,
    group: Group | None = None,
    fault: Fault = no_fault,
) -> int:
    """Write ``sharded_state_dict`` and ``objects`` as the directory ``checkpoint_dir``, on a file system that all ranks
    share, replacing one of that name; return the bytes of all ranks' tensor files. Collective over ``group`` (default:
    the world); copies from the device block by block and waits for each. Keys are ignored in favor of the tensors'
    names. Only the first rank's ``objects`` (JSON values) are stored, and ``assets`` copied: name in the checkpoint
    (``folder/file``) -> source. CheckpointWriteError on all ranks if any of them could not write."""
    group = group or all_ranks()
    part = plan(sharded_state_dict, group)
    return write(part, checkpoint_dir, host_blocks, objects=objects, assets=assets, group=group, fault=fault)


@dataclass(frozen=True)
class WritePlan:
    """Shards that one rank writes. Keeps references to their memory; see :meth:`without_data`."""

    tensors: list[ShardedTensor]
    """Tensors in file order: staging and writing must use the same order."""
    empty: dict[str, TensorEntry]
    """Manifest entries of global tensors without any element."""

    @property
    def num_bytes(self) -> int:
        """Total size of this rank's tensors in bytes."""
        return sum(tensor.local.numel() * tensor.local.element_size() for tensor in self.tensors)

    def without_data(self) -> WritePlan:
        """Return a copy with meta tensors, so that training may modify or free the original memory."""
        return replace(self, tensors=[replace(tensor, local=tensor.local.to("meta")) for tensor in self.tensors])


def plan(sharded_state_dict: Mapping[str, ShardedTensor], group: Group) -> WritePlan:
    """Assign each shard to one of the ranks that hold it, balanced by bytes, and return this rank's part. Collective
    over ``group``. Empty local tensors are skipped; global tensors without elements become manifest entries."""
    tensors = {(t.name, t.offsets): t for t in sharded_state_dict.values() if t.local.numel()}
    mine = _plan(tensors, group)
    return WritePlan(sorted((tensors[key] for key in mine), key=_stem), _empty_tensors(sharded_state_dict))


def write(
    part: WritePlan,
    checkpoint_dir: str | os.PathLike,
    blocks: Blocks,
    *,
    objects: dict[str, object] | None = None,
    assets: Mapping[str, str | os.PathLike] | None = None,
    group: Group,
    fault: Fault = no_fault,
) -> int:
    """Write and publish the plans ``part`` of all ranks of ``group``, as :func:`save`. ``blocks``: returns the bytes of
    a tensor of ``part``; called once per tensor, in file order. After an error the first rank has deleted the hidden
    directory and restored a checkpoint renamed for replacement."""
    final = Path(checkpoint_dir)
    fault("before_directory")
    run_id = from_first_rank(lambda: uuid.uuid4().hex, group)
    temporary = final.with_name(f".{final.name}{TEMPORARY}{run_id[:8]}")
    try:

        def make_directory() -> None:
            if group.is_first:
                make_durable_folder(final.parent)
                temporary.mkdir()

        together(make_directory, group, CheckpointWriteError)
        fault("before_shards")
        with ThreadPoolExecutor(1, "checksums") as checksums:
            writer = _RankWriter(temporary, run_id, group.rank, fault, blocks, checksums)
            written = together(lambda: writer.write(part.tensors), group, CheckpointWriteError)
        fault("after_shards")

        def publish() -> None:
            if not group.is_first:
                return
            copies = (assets or {}).items()
            entries = {name: copy_asset(Path(source), temporary / name) for name, source in copies}
            files, tensors = _merge(written, dict(part.empty))
            manifest: Manifest = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "run_id": run_id,
                "world_size": group.size,
                "objects": objects or {},
                "assets": entries,
                "files": files,
                "tensors": tensors,
            }
            fault("before_manifest")
            write_file(temporary / MANIFEST, encode(manifest))
            fsync_path(temporary)
            fault("before_rename")
            _publish(temporary, final, fault)
            fault("after_rename")

        together(publish, group, CheckpointWriteError)
    except CheckpointError:
        if group.is_first:
            remove(temporary)
            if final.parent.is_dir():
                recover(final.parent)
        raise
    return sum(entry["bytes"] for files in written for entry in files["files"].values())


def _plan(tensors: Mapping[Key, ShardedTensor], group: Group) -> list[Key]:
    """Return the sorted (name, offsets) that this rank writes: largest first, to the least loaded rank with the shard
    (ties: the first). One all-gather of sizes, from which all ranks compute the same assignment."""
    offers = [[key[0], list(key[1]), t.local.numel() * t.local.element_size()] for key, t in tensors.items()]
    holders: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    for rank, offered in enumerate(all_gather_json(offers, group)):
        for name, offsets, size in offered:
            holders.setdefault((name, tuple(offsets)), []).append(rank)
            sizes[name, tuple(offsets)] = size
    load = [0] * group.size
    mine = []
    # all ranks sort the same list identically, so that no second exchange is needed
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        owner = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owner] += sizes[key]
        if owner == group.rank:
            mine.append(key)
    return sorted(mine)


def _empty_tensors(tensors: Mapping[str, ShardedTensor]) -> dict[str, TensorEntry]:
    empty = [t for t in tensors.values() if math.prod(t.global_shape) == 0]
    return {t.name: {"shape": list(t.global_shape), "dtype": DTYPE_NAMES[t.local.dtype], "chunks": []} for t in empty}


def _merge(
    written: list[WrittenFiles], entries: dict[str, TensorEntry]
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """``entries`` (of empty tensors) is filled in place. CheckpointWriteError if ranks disagree on a shape or dtype,
    CheckpointError if a tensor is not covered exactly once. Rank 0 only; no I/O."""
    files: dict[str, FileEntry] = {}
    for part in written:
        files.update(part["files"])
        for name, shape, dtype, chunk in part["chunks"]:
            entry = entries.setdefault(name, {"shape": shape, "dtype": dtype, "chunks": []})
            if entry["shape"] != shape or entry["dtype"] != dtype:
                raise CheckpointWriteError(
                    f"{name}: ranks disagree: shape {shape} {dtype} against {entry['shape']} {entry['dtype']}"
                )
            entry["chunks"].append(chunk)
    check_coverage(entries)
    return files, entries


class WrittenFiles(TypedDict):
    """Part of the manifest that one rank wrote."""

    files: dict[str, FileEntry]
    chunks: list[tuple[str, list[int], str, Chunk]]
    """Name, global shape and dtype of the tensor, and its chunk."""


class _RankWriter:
    """Writer of this rank's files: one per first component of the names (``model``, ``optimizer``, …)."""

    def __init__(
        self, directory: Path, run_id: str, rank: int, fault: Fault, blocks: Blocks, checksums: ThreadPoolExecutor
    ) -> None:
        self.directory, self.run_id, self.rank, self.fault = directory, run_id, rank, fault
        self.blocks, self.checksums = blocks, checksums

    def write(self, tensors: list[ShardedTensor]) -> WrittenFiles:
        """Write durably; return ``{"files": {file: entry}, "chunks": [[name, shape, dtype, chunk], …]}``."""
        parts: dict[str, list[ShardedTensor]] = {}
        for tensor in tensors:
            parts.setdefault(_stem(tensor), []).append(tensor)
        result: WrittenFiles = {"files": {}, "chunks": []}
        for stem, members in parts.items():
            file_name = f"{stem}_{self.rank:05d}.safetensors"
            entry, chunks = self._write_file(file_name, members)
            result["files"][file_name] = entry
            result["chunks"] += chunks
        fsync_path(self.directory)  # sync the names too, before the manifest refers to them
        self.fault("shards_written")
        return result

    def _write_file(
        self, file_name: str, tensors: list[ShardedTensor]
    ) -> tuple[FileEntry, list[tuple[str, list[int], str, Chunk]]]:
        """Fsyncs. Raises FileExistsError."""
        keyed = [(_key(tensor), tensor) for tensor in tensors]
        kinds = ((key, tensor.local.dtype, tensor.local.shape) for key, tensor in keyed)
        header, starts = safetensors_header(kinds, {"format": "pt", "run_id": self.run_id})
        chunks: list[tuple[str, list[int], str, Chunk]] = []
        with open(self.directory / file_name, "xb") as file:
            file.write(header)
            for index, (key, tensor) in enumerate(keyed):
                if index == len(tensors) // 2:
                    file.flush()
                    self.fault("mid_shard")
                chunk: Chunk = {
                    "offsets": list(tensor.offsets),
                    "shape": list(tensor.local.shape),
                    "file": file_name,
                    "key": key,
                    "start": starts[index],
                    "crc32": _write_blocks(file, self.blocks(tensor.local), self.checksums),
                }
                chunks.append((tensor.name, list(tensor.global_shape), DTYPE_NAMES[tensor.local.dtype], chunk))
            self.fault("before_fsync")
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        return {"bytes": size, "header_bytes": len(header), "header_crc32": zlib.crc32(header)}, chunks


def _key(tensor: ShardedTensor) -> str:
    is_full = tuple(tensor.local.shape) == tuple(tensor.global_shape)
    return tensor.name + ("" if is_full else "@" + ",".join(map(str, tensor.offsets)))


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Return (header, starts) of a safetensors file of ``tensors`` (key, dtype, shape): its first bytes, padded to 8
    bytes so that mapped tensors are aligned, and the byte in the file at which each tensor starts."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    begins, end = [], 0
    for key, dtype, shape in tensors:
        begins.append(end)
        end += math.prod(shape) * dtype.itemsize
        entries[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begins[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + begin for begin in begins]


def host_blocks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes in blocks of ``BLOCK_BYTES``: views of CPU memory, or copies of device memory."""
    data = flat_bytes(tensor)
    # one block at a time: a host copy of the full tensor could exceed the free memory
    for start in range(0, data.numel(), BLOCK_BYTES):
        # Tensor.numpy would fix the size of the storage forever, which HostCopy changes
        yield memoryview(np.from_dlpack(data[start : start + BLOCK_BYTES].cpu()))  # type: ignore[arg-type]


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a flat uint8 view of ``tensor``; of a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _write_blocks(file: BinaryIO, blocks: Iterator[memoryview], checksums: ThreadPoolExecutor) -> list[int]:
    """Return the CRC-32s of the blocks, computed while writing (both release the GIL)."""
    checksums_of_blocks = []
    for block in blocks:
        checksum = checksums.submit(zlib.crc32, block)
        file.write(block)
        checksums_of_blocks.append(checksum.result())
    return checksums_of_blocks


def _stem(tensor: ShardedTensor) -> str:
    return tensor.name.split(".")[0]


def write_file(path: Path, data: bytes) -> None:
    """Create a file with ``data`` and fsync it; raise FileExistsError if it exists."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_asset(source: Path, target: Path) -> AssetEntry:
    """Copy ``source`` (at most 2 GiB; read into memory) to the new file ``target``, whose folders are created, and
    fsync them; return its manifest entry. Raises OSError."""
    data = read_file(source, MAX_ASSET_BYTES)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, data)
    for folder in (target.parent, target.parent.parent):
        fsync_path(folder)
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def write_file_atomically(path: Path, data: bytes, fault: Fault = no_fault) -> None:
    """Replace ``path`` by ``data`` atomically and durably: after a crash it has the old or the new content. Writes a
    hidden temporary file, which is removed after an OSError. ``fault`` is called once, before the rename."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        write_file(temporary, data)
        fault("before_tracker_rename")
        os.replace(temporary, path)
        fsync_path(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_durable_folder(path: Path) -> None:
    """Create ``path`` and its missing parents, and fsync the folders that contain the new names."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # a parent that may be written but not read cannot be synced
            fsync_path(folder.parent)


def _publish(temporary: Path, final: Path, fault: Fault) -> None:
    """Rename and fsync. An existing ``final`` is renamed first and deleted last (see :func:`recover`)."""
    replaced = final.with_name(f".{final.name}{REPLACED}")
    if final.exists():
        remove(replaced)
        os.rename(final, replaced)
        fault("between_renames")
    # from this rename on the checkpoint exists; the tracker moves only after it is durable
    os.rename(temporary, final)
    fsync_path(final.parent)
    remove(replaced)


def recover(parent: str | os.PathLike) -> None:
    """Rename ``.NAME.old`` folders in ``parent`` back to NAME unless NAME exists: checkpoints that were renamed for a
    replacement that failed. Skips links and files. Call from one process only."""
    for replaced in Path(parent).glob(f".*{REPLACED}"):
        final = replaced.with_name(replaced.name[1 : -len(REPLACED)])
        if not os.path.lexists(final) and replaced.is_dir() and not replaced.is_symlink():
            os.rename(replaced, final)


def remove_leftovers(parent: str | os.PathLike) -> None:
    """First :func:`recover` checkpoints, then delete what interrupted saves and deletions left in ``parent``: hidden
    ``.tmp-`` and ``.old`` names. Ignores errors of deletion. Only the process with the lock may call it."""
    recover(parent)
    for pattern in (f".*{TEMPORARY}*", f".*{REPLACED}"):
        for path in Path(parent).glob(pattern):
            remove(path)
