"""Manifest ``metadata.json``: contents of a checkpoint directory, with checksums of all bytes.

One line of JSON that ends in the sha256 of the preceding bytes::

    {"format": …, "format_version": 1, "run_id": …, "world_size": …, "objects": {…},
     "assets": {folder/file: {"bytes", "crc32"}},
     "files": {file: {"bytes", "header_bytes", "header_crc32"}},
     "tensors": {name: {"shape", "dtype", "chunks": [{"offsets", "shape", "file", "key", "start", "crc32": [blocks]}]}},
     "sha256": "…"}

Files are safetensors; their names are plain names, never paths. A reader needs no pickle and trusts no name: this is
why the format differs from torch.distributed.checkpoint, whose metadata is a pickle and whose data has no checksums."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import read_regular_file
from megatron.core.sharding.rectangles import Rectangle, coverage_problem

MANIFEST = "metadata.json"
FORMAT = "megatron-sharded-safetensors"
FORMAT_VERSION = 1
BLOCK_BYTES = 16 * 2**20
"""Unit of checksums within a chunk, staging on save, and reading."""
MAX_MANIFEST_BYTES = 2**30
MAX_HEADER_BYTES = 100 * 2**20  # as other readers of safetensors have it
MAX_DIMS = 32
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Bytes per element of every storable dtype, by safetensors name; here, so that a manifest is read without torch."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
ASSET_NAME = re.compile(r"([A-Za-z0-9_-]+/){1,2}[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SUFFIX = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\n')
_SUFFIX_BYTES = len(b',"sha256":"') + 64 + len(b'"}\n')


class FileEntry(TypedDict):
    """Tensor file."""

    bytes: int
    header_bytes: int
    header_crc32: int


class AssetEntry(TypedDict):
    """Copied file."""

    bytes: int
    crc32: int


class Chunk(TypedDict):
    """Rectangle of a tensor in a file."""

    offsets: list[int]
    shape: list[int]
    file: str
    key: str
    start: int
    crc32: list[int]


class TensorEntry(TypedDict):
    """Global tensor."""

    shape: list[int]
    dtype: str
    chunks: list[Chunk]


class Manifest(TypedDict):
    """Contents of a checkpoint."""

    format: str
    format_version: int
    run_id: str
    world_size: int
    objects: dict[str, Any]
    assets: dict[str, AssetEntry]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


def encode(manifest: Mapping[str, object]) -> bytes:
    """Encode a manifest to the bytes of its file, including the sha256."""
    body = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def decode(data: bytes, path: Path) -> Manifest:
    """Decode the bytes of a manifest file and check its structure and the coverage of every tensor. Raises
    ``CheckpointDamagedError`` for any deviation, also for another format or version."""
    body, suffix = data[:-_SUFFIX_BYTES], data[-_SUFFIX_BYTES:]
    match = _SUFFIX.fullmatch(suffix)
    if not match or hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise CheckpointDamagedError(f"{path}: damaged or incomplete (its checksum does not match)")
    try:
        manifest = json.loads(body + b"}")
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path}: not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointDamagedError(f"{path}: not a checkpoint of format {FORMAT}")
    version = manifest.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointDamagedError(
            f"{path}: format version {version!r:.40}, this program reads version {FORMAT_VERSION}"
        )
    _check_structure(manifest, path)
    return cast("Manifest", manifest)


def _is_sizes(value: object, length: int | None = None) -> bool:
    return (
        isinstance(value, list)
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
        and (length is None or len(value) == length)
    )


def _check_structure(manifest: dict[str, object], path: Path) -> None:
    """Raise CheckpointDamagedError unless all entries are well-formed, names plain (no paths), chunks inside their
    tensor and file, and every tensor covered once: a crafted file can have a valid checksum."""
    files, tensors, assets = (manifest.get(key) for key in ("files", "tensors", "assets"))
    if not isinstance(files, dict) or not isinstance(tensors, dict) or not isinstance(manifest.get("objects"), dict):
        raise CheckpointDamagedError(f"{path}: files, tensors or objects are missing")
    if not isinstance(manifest.get("run_id"), str) or not _is_sizes([manifest.get("world_size")]):
        raise CheckpointDamagedError(f"{path}: run_id or world_size is malformed")
    for name, entry in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointDamagedError(f"{path}: file name {name!r} is rejected: not a plain *.safetensors name")
        if not _has_sizes(entry, "bytes", "header_bytes", "header_crc32") or not (
            8 <= entry["header_bytes"] <= min(entry["bytes"], MAX_HEADER_BYTES)
        ):
            raise CheckpointDamagedError(f"{path}: the entry of file {name} is malformed")
    for name, entry in (assets if isinstance(assets, dict) else {"": None}).items():
        if not ASSET_NAME.fullmatch(name) or not _has_sizes(entry, "bytes", "crc32"):
            raise CheckpointDamagedError(f"{path}: asset name {name!r} is rejected")
    for name, entry in tensors.items():
        shape: Any = entry.get("shape") if isinstance(entry, dict) else None
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        well_formed = _is_sizes(shape) and len(shape) <= MAX_DIMS and isinstance(dtype, str) and dtype in ITEM_BYTES
        if not well_formed or not isinstance(entry.get("chunks"), list):
            raise CheckpointDamagedError(f"{path}: the entry of tensor {name} is malformed")
        for chunk in entry["chunks"]:
            _check_chunk(chunk, shape, ITEM_BYTES[str(dtype)], files, f"{path}: tensor {name}")
    try:
        check_coverage(tensors)
    except CheckpointError as error:
        raise CheckpointDamagedError(f"{path}: {error}") from None


def _has_sizes(entry: object, *keys: str) -> bool:
    return isinstance(entry, dict) and _is_sizes([entry.get(key) for key in keys])


def _check_chunk(chunk: Any, shape: list[int], itemsize: int, files: Mapping[str, FileEntry], where: str) -> None:
    """Raise CheckpointDamagedError unless the chunk is in its tensor and a listed file, with one CRC-32 per block."""
    fits = (
        isinstance(chunk, dict)
        and isinstance(chunk.get("key"), str)
        and isinstance(chunk.get("file"), str)
        and chunk["file"] in files
        and _is_sizes(chunk.get("offsets"), len(shape))
        and _is_sizes(chunk.get("shape"), len(shape))
        and _is_sizes([chunk.get("start")])
        and _is_sizes(chunk.get("crc32"))
        and all(o + n <= total for o, n, total in zip(chunk["offsets"], chunk["shape"], shape))
    )
    size = math.prod(chunk["shape"]) * itemsize if fits else 0
    if (
        not fits
        or chunk["start"] + size > files[chunk["file"]]["bytes"]
        or len(chunk["crc32"]) != -(-size // BLOCK_BYTES)
    ):
        raise CheckpointDamagedError(f"{where}: malformed chunk")


def read_manifest(directory: str | os.PathLike) -> Manifest:
    """Return the manifest of ``directory`` after checking that exactly its ``*.safetensors`` files exist, in their
    sizes; reads no tensor data. CheckpointDamagedError lists all missing, foreign or wrongly sized files."""
    directory = Path(directory)
    path = directory / MANIFEST
    try:
        manifest = decode(read_regular_file(path, MAX_MANIFEST_BYTES), path)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{directory}: no checkpoint ({MANIFEST} is missing)") from None
    problems = []
    for name, entry in manifest["files"].items():
        try:
            status = (directory / name).lstat()
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        except OSError as error:
            problems.append(f"{name} cannot be looked at ({error.strerror})")
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{name} is not a regular file")
        elif status.st_size != entry["bytes"]:
            problems.append(f"{name} has {status.st_size} bytes instead of {entry['bytes']}")
    foreign = {path.name for path in directory.glob("*.safetensors")} - set(manifest["files"])
    problems += [f"{name} does not belong to it" for name in sorted(foreign)]
    if problems:
        raise CheckpointDamagedError(f"{directory}: the checkpoint is damaged: {'; '.join(problems)}")
    return manifest


def check_coverage(tensors: Mapping[str, TensorEntry]) -> None:
    """Raise ``CheckpointError`` with all tensors that their chunks do not cover exactly once."""
    problems = []
    for name, entry in tensors.items():
        chunks = [chunk_rectangle(chunk) for chunk in entry["chunks"]]
        if coverage_problem(entry["shape"], chunks):
            places = [(chunk["offsets"], chunk["shape"]) for chunk in entry["chunks"]]
            problems.append(f"{name} of shape {entry['shape']} is not covered exactly once by {places!r:.2000}")
    if problems:
        raise CheckpointError("; ".join(problems))


def chunk_rectangle(chunk: Chunk) -> Rectangle:
    """Return the rectangle (global coordinates) that a chunk stores."""
    return Rectangle(tuple(chunk["offsets"]), tuple(chunk["shape"]))
