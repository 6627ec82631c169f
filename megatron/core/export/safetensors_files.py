"""Safetensors files read and written tensor by tensor: never more of a model in memory than one of its tensors.

A file is 8 bytes of length, that many bytes of JSON ``{name: {"dtype", "shape", "data_offsets"}}``, and the data. Files
come from anybody: offsets, sizes and types are checked before anything is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.manifest import BLOCK_BYTES, MAX_DIMS, MAX_HEADER_BYTES
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.sharding.sharded_tensor import DTYPE_NAMES, DTYPES

METADATA = "__metadata__"


def open_safetensors(path: str | os.PathLike) -> dict[str, LazyTensor]:
    """What the file ``path`` holds; ``UserError`` for one that is damaged, with the tensor that is."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise UserError(f"{path}: not a safetensors file, or truncated: {size} bytes, a header of {length}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: its header is no table")
    header.pop(METADATA, None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _entry(path: Path, name: str, entry: Any, data: int, size: int) -> LazyTensor:
    shape: Any
    ends: Any
    shape, ends = (entry.get(key) if isinstance(entry, dict) else None for key in ("shape", "data_offsets"))
    fits = isinstance(shape, list) and len(shape) <= MAX_DIMS and isinstance(ends, list) and len(ends) == 2
    if not fits or any(type(each) is not int or each < 0 for each in (*shape, *ends)):
        raise UserError(f"{path}: the entry of {name} is malformed")
    if entry.get("dtype") not in DTYPES:
        raise UserError(f"{path}: {name} is of type {entry.get('dtype')!r:.40}, which cannot be read")
    dtype = DTYPES[entry["dtype"]]
    if ends[1] - ends[0] != math.prod(shape) * dtype.itemsize:
        raise UserError(f"{path}: {name} of shape {shape} {entry['dtype']} has {ends[1] - ends[0]} bytes of data")
    if data + ends[1] > size:
        raise UserError(f"{path}: truncated: {name} ends at byte {data + ends[1]}, the file at {size}")
    row = math.prod(shape[1:])

    def rows(start: int, stop: int) -> Tensor:
        return _read(path, name, data + ends[0] + start * row * dtype.itemsize, dtype, [stop - start, *shape[1:]])

    return LazyTensor(tuple(shape), dtype, partial(_read, path, name, data + ends[0], dtype, shape), rows)


def _read(path: Path, name: str, start: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    values = torch.empty(shape, dtype=dtype)
    if not values.numel():
        return values
    view = memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        done = 0
        while done < len(view):  # one call reads at most 2 GiB
            count = file.readinto(view[done:])
            if not count:
                raise UserError(f"{path}: ends within {name}")
            done += count
    return values


def write_safetensors(
    path: str | os.PathLike, tensors: Mapping[str, LazyTensor], *, dtypes: Mapping[str, torch.dtype] | None = None,
    on_tensor: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Write the new file ``path`` and fsync it.

    Args:
        dtypes: for some names another type than the tensor's own, which values are rounded to.
        on_tensor: told each name once its data is written.
    """
    kinds = {name: (dtypes or {}).get(name, tensor.dtype) for name, tensor in tensors.items()}
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    cursor = 0
    for name, tensor in tensors.items():
        end = cursor + math.prod(tensor.shape) * kinds[name].itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[kinds[name]], "shape": list(tensor.shape), "data_offsets": [cursor, end]
        }  # fmt: skip
        cursor = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors.items():
            values = tensor.read().to(kinds[name]).contiguous()
            assert tuple(values.shape) == tensor.shape, f"{name}: read {tuple(values.shape)}, promised {tensor.shape}"
            data = values.reshape(-1).view(torch.uint8)
            for start in range(0, data.numel(), BLOCK_BYTES):
                file.write(memoryview(data[start : start + BLOCK_BYTES].numpy()))  # type: ignore[arg-type]
            del values, data  # before the next one is read
            if on_tensor is not None:
                on_tensor(name)
        file.flush()
        os.fsync(file.fileno())
