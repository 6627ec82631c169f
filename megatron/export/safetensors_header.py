"""Parser of safetensors headers with the checks of the safetensors library.

A file consists of ``length`` (uint64), a JSON header of that length, and the tensors' bytes without gaps or overlaps.
Names with control characters are also rejected, because messages and listings print them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple, TypeGuard

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.manifest import MAX_HEADER_BYTES
from megatron.core.safe_files import open_regular, parse_json
from megatron.core.sharding.sharded_tensor import DTYPES
from megatron.export.interchange import check_names

METADATA = "__metadata__"


class Entry(NamedTuple):
    """Dtype, shape and byte range of a tensor; ``begin`` and ``end`` are offsets from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class _MalformedError(ValueError):
    pass


def read_header(path: Path) -> dict[str, Entry]:
    """Return name -> entry for every tensor. Raises CheckpointDamagedError if the file cannot be read, is truncated or
    has no JSON header; or for a malformed entry, and then the message names the tensor."""
    try:
        with open_regular(path) as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or not 2 <= length <= min(total - 8, MAX_HEADER_BYTES):
                raise CheckpointDamagedError(f"{path}: truncated, or no safetensors file ({total} bytes)")
            text = file.read(length)
    except OSError as error:
        raise CheckpointDamagedError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        header = parse_json(text, unique=True)
        if not isinstance(header, dict):
            raise ValueError("it holds something else")
    except ValueError as error:
        raise CheckpointDamagedError(f"{path}: its safetensors header is no JSON table ({error})") from None
    check_names(header, path)
    try:
        return _entries(header, 8 + length, total)
    except _MalformedError as error:
        raise CheckpointDamagedError(f"{path}: {error}") from None


def _entries(header: dict[str, object], origin: int, total: int) -> dict[str, Entry]:
    """Drops metadata. Raises _MalformedError unless tensors fill bytes ``origin`` to ``total`` without gaps."""
    metadata = header.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _MalformedError(f"{METADATA} is not a table of texts")
    entries = {name: _entry(name, value, origin) for name, value in header.items()}
    end, before = origin, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.end > total:
            raise _MalformedError(f"truncated: tensor {name} would end at byte {entry.end}, the file has {total}")
        if entry.begin != end:
            kind = "overlaps" if entry.begin < end else "leaves a gap after"
            raise _MalformedError(f"tensor {name} at byte {entry.begin} {kind} {before}, which ends at byte {end}")
        end, before = entry.end, f"tensor {name}"
    if end != total:
        raise _MalformedError(f"has {total - end} bytes after its last tensor")
    return entries


def _entry(name: str, value: object, origin: int) -> Entry:
    """Raises _MalformedError for an unknown dtype, or a range whose size is not that of the shape."""
    if isinstance(value, dict):
        dtype, shape, place = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if _are_sizes(shape) and _are_sizes(place) and len(place) == 2 and isinstance(dtype, str):
            if dtype not in DTYPES:
                raise _MalformedError(f"tensor {name} is of type {dtype!r:.20}, readable are {', '.join(DTYPES)}")
            if math.prod(shape) * DTYPES[dtype].itemsize == place[1] - place[0]:
                return Entry(DTYPES[dtype], tuple(shape), origin + place[0], origin + place[1])
    raise _MalformedError(f"the entry of tensor {name:.200} is malformed: {str(value):.120}")


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or not {*map(type, value)} <= {int}:
        return False
    return not value or 0 <= min(value) <= max(value) < 2**63
