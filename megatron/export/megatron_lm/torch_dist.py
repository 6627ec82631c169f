"""Reader of Megatron-LM's ``torch_dist`` format: ``.metadata`` maps rectangles of global tensors to ``__R_C.distcp``.

Layers are stacked under one name (``decoder.layers.mlp.linear_fc2.weight``, [layers, …]) or stored under separate
names. Optimizer state (``exp_avg`` …) is stored as global tensors (``fully_reshardable``,
``fully_sharded_model_space``; in older files as flattened shards of each rank), or as flat buckets per tensor- and
pipeline-parallel rank (``dp_reshardable``)."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import stat
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import read_regular_file
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.sharding.rectangles import Rectangle, coverage_problem
from megatron.export.interchange import Interchange, check_names
from megatron.export.megatron_lm.buckets import STATES, unflatten_distributed
from megatron.export.megatron_lm.model import build_interchange, find_folder
from megatron.export.megatron_lm.names import MAX_LAYERS, SECTIONS, current_names, detect_family, is_no_weight
from megatron.export.torch_file import read_torch_file
from megatron.export.unpickler import Record, unpickle

MAX_METADATA_BYTES = 2**30
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.distcp")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:\d+\.)?state\.(exp_avg_sq|exp_avg|fp32_param|param)\.(.+)")
_SECTION = re.compile(r"(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.(\w+)")
_STACKED = re.compile(r"(.*\b(?:decoder|encoder)\.layers)\.([a-z_].*)")


@dataclass
class _Stored:
    """A global tensor in pieces; each is a ``torch.save`` file at an offset of a larger file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[Rectangle, tuple[Path, int, int]] = field(default_factory=dict)
    original: tuple[int, ...] | None = None
    """Global shape of a tensor in flattened shards; ``shape`` is then (shards per dimension…, flat shard size)."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape if self.original is None else self.original

    def read(self, rectangle: Rectangle) -> Tensor:
        """Read a rectangle (global coordinates). Flat parts of rank shards are put together in their original shape."""
        if self.original is None:
            return self._stored(rectangle)
        *counts, flat = self.shape
        local = tuple(total // count for total, count in zip(self.original, counts))
        out = torch.empty(rectangle.lengths, dtype=self.dtype)
        for index in itertools.product(*map(range, counts)):
            part = Rectangle(tuple(i * n for i, n in zip(index, local)), local)
            if (shared := part.intersect(rectangle)) is not None:
                values = self._stored(Rectangle((*index, 0), (*(1,) * len(counts), flat))).reshape(local)
                shared.of(out, rectangle.offsets).copy_(shared.of(values, part.offsets))
        return out

    def read_rows(self, start: int, stop: int) -> Tensor:
        return self.read(
            Rectangle((start, *(0,) * (len(self.global_shape) - 1)), (stop - start, *self.global_shape[1:]))
        )

    def lazy(self, layer: int | None = None) -> LazyTensor:
        """With ``layer``: entry ``layer`` of the first dimension."""
        if layer is None:
            return LazyTensor(
                self.global_shape, self.dtype, partial(self.read, Rectangle.whole(self.global_shape)), self.read_rows
            )
        return LazyTensor(self.global_shape[1:], self.dtype, lambda: self.read_rows(layer, layer + 1)[0])

    def _stored(self, rectangle: Rectangle) -> Tensor:
        out = torch.empty(rectangle.lengths, dtype=self.dtype)
        for piece, place in self.pieces.items():
            if (shared := piece.intersect(rectangle)) is not None:
                shared.of(out, rectangle.offsets).copy_(shared.of(self._piece(piece, place), piece.offsets))
        return out

    def _piece(self, piece: Rectangle, place: tuple[Path, int, int]) -> Tensor:
        """``place``: (path, offset, size). Raises CheckpointDamagedError for another shape or dtype."""
        value = read_torch_file(*place)
        if not isinstance(value, LazyTensor) or value.shape != piece.lengths or value.dtype != self.dtype:
            content = f"shape {value.shape} {value.dtype}" if isinstance(value, LazyTensor) else "no tensor"
            raise CheckpointDamagedError(
                f"{place[0]}: {self.name} is {content} at byte {place[1]}, expected {piece.lengths} {self.dtype}"
            )
        return value.read()


@dataclass
class _Checkpoint:
    folder: Path
    tensors: dict[str, _Stored]
    objects: dict[str, tuple[Path, int, int]]

    def state(self) -> dict[str, Any]:
        """Read ``common.pt``, or, if that file is missing, the object ``common_state``."""
        common = self.folder / "common.pt"
        if common.exists() or "common_state" not in {name.partition("/")[0] for name in self.objects}:
            value = read_torch_file(common)
        else:
            value = self.object("common_state")
        if not isinstance(value, dict):
            raise CheckpointDamagedError(f"{common}: not a dictionary")
        return value

    def object(self, name: str) -> Any:
        """Of several shards, reads the first."""
        keys = sorted(key for key in self.objects if key.partition("/")[0] == name)
        value = read_torch_file(*self.objects[keys[0]])
        return value[0] if isinstance(value, list) and len(value) == 1 else value


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every tensor. Raises CheckpointError: no checkpoint, or damaged."""
    return {name: stored.global_shape for name, stored in _open(folder).tensors.items()}


def read_common_state(folder: Path) -> dict[str, object]:
    """Return the unsharded state of a checkpoint folder; see ``_Checkpoint.state``. Raises CheckpointError."""
    return _open(folder).state()


def load_megatron_torch_dist(
    folder: str | os.PathLike, step: int | None = None, *, padded_vocabulary: bool = False
) -> Interchange:
    """Open a ``--ckpt-format torch_dist`` folder: model and training state, with lazy tensors.

    Args:
        folder: the --load folder, or one ``iter_…`` directory in it.
        step: the iteration; None: the tracker's.
        padded_vocabulary: keep the padding rows of the vocabulary. Megatron-LM's softmax includes them, so the run
            resumes with identical losses; without them it resumes with the true vocabulary.

    Raises:
        CheckpointError: a file is missing, damaged or incomplete, a pickle is unsafe, or a layer has no counterpart."""
    checkpoint = _open(find_folder(Path(folder), step, ".metadata"))
    state = checkpoint.state()
    weights: dict[str, LazyTensor] = {}
    optimizer: dict[str, dict[str, LazyTensor]] = {}
    flat: dict[str, LazyTensor] = {}
    for name, stored in checkpoint.tensors.items():
        if match := _STATE.fullmatch(name):
            _add(optimizer.setdefault(STATES[match[1]], {}), match[2], stored)
        elif ".distributed.dp_group_idx_" in name:
            flat[name] = stored.lazy()
        elif not is_no_weight(name) and not name.startswith(("optimizer.", "chained_")):
            _add(weights, name.removeprefix("model."), stored)
    if flat:
        args = state["args"].attributes if isinstance(state.get("args"), Record) else {}
        optimizer = unflatten_distributed(flat, weights, args, str(checkpoint.folder))
        group = next((name for name in checkpoint.objects if ".dp_group_idx_0.optimizer/" in name), None)
        state["optimizer"] = None if group is None else read_torch_file(*checkpoint.objects[group])
    weights, optimizer = _joined(weights), {kind: _joined(named) for kind, named in optimizer.items()}
    family, where = detect_family(weights), str(checkpoint.folder)
    weights = current_names(weights, family)
    optimizer = {kind: current_names(named, family) for kind, named in optimizer.items()}
    return build_interchange(state, weights, optimizer, where=where, padded_vocabulary=padded_vocabulary)


def _add(named: dict[str, LazyTensor], name: str, stored: _Stored) -> None:
    """One tensor per layer if layers are stacked. Raises CheckpointDamagedError for too many layers."""
    match = _STACKED.fullmatch(name)
    if match is None:
        named[name] = stored.lazy()
        return
    if not 0 < stored.global_shape[0] <= MAX_LAYERS:
        raise CheckpointDamagedError(f"{name}: has {stored.global_shape[0]} layers, at most {MAX_LAYERS} are expected")
    for layer in range(stored.global_shape[0]):
        named[f"{match[1]}.{layer}.{match[2]}"] = stored.lazy(layer)


def _joined(named: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Join the sections of projections and convolutions. Raises CheckpointError if one is missing."""
    result: dict[str, LazyTensor] = {}
    parts: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in named.items():
        if match := _SECTION.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = tensor
        else:
            result[name] = tensor
    for name, sections in parts.items():
        order = next((order for order in SECTIONS.values() if {*order} == sections.keys()), None)
        if order is None:
            raise CheckpointError(f"{name}: has sections {', '.join(sorted(sections))} only")
        pieces = [sections[section] for section in order]
        shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        result[name] = LazyTensor(shape, pieces[0].dtype, partial(_concatenated, pieces))
    return result


def _concatenated(pieces: list[LazyTensor]) -> Tensor:
    return torch.cat([piece.read() for piece in pieces])


def _open(folder: Path) -> _Checkpoint:
    """Check that all files are long enough, and that pieces cover every tensor exactly once. Reads no tensors."""
    path = folder / ".metadata"
    data = read_regular_file(path, MAX_METADATA_BYTES, follow=True)
    metadata = unpickle(io.BytesIO(data), len(data), str(path))
    try:
        return _parse(metadata, folder)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointDamagedError(f"{path}: not metadata of torch.distributed.checkpoint ({error!r:.100})") from None


def _parse(metadata: Record, folder: Path) -> _Checkpoint:
    """Raises CheckpointDamagedError for file names with folders, ranges outside a file, or pieces that do not cover a
    tensor exactly; CheckpointError for compressed data."""
    sizes: dict[str, int] = {}
    places: dict[str, dict[tuple[int, ...] | None, tuple[Path, int, int]]] = {}
    for index, info in metadata["storage_data"].items():
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if not _FILE_NAME.fullmatch(file):
            raise CheckpointDamagedError(f"{folder}: file name {file!r:.80} is rejected")
        if file not in sizes:
            sizes[file] = _size(folder / file)
        if info.attributes.get("transform_descriptors"):
            raise CheckpointError(f"{folder}: {index['fqn']} is compressed or otherwise transformed")
        if type(start) is not int or type(length) is not int or not 0 <= start <= start + length <= sizes[file]:
            raise CheckpointDamagedError(f"{folder / file}: has {sizes[file]} bytes, {index['fqn']} ends beyond")
        if (offset := index.attributes.get("offset")) in places.setdefault(index["fqn"], {}):
            raise CheckpointDamagedError(f"{folder}: the piece of {index['fqn']} at {offset} is stored twice")
        places[index["fqn"]][offset] = (folder / file, start, length)
    check_names(metadata["state_dict_metadata"], folder / ".metadata")
    flattened = metadata.attributes.get("mcore_data") or {}
    tensors, objects = {}, {}
    for name, entry in metadata["state_dict_metadata"].items():
        if entry.kind.endswith("BytesStorageMetadata"):
            objects[name] = next(iter(places[name].values()))
            continue
        properties = entry["properties"]
        dtype = properties.attributes["state"][0] if "state" in properties.attributes else properties["dtype"]
        if not isinstance(dtype, torch.dtype):
            raise CheckpointDamagedError(f"{folder}: {name}: {dtype!r:.60} is no dtype of torch")
        stored = _Stored(name, tuple(entry["size"]), dtype)
        for chunk in entry["chunks"]:
            piece = Rectangle(tuple(chunk["offsets"]), tuple(chunk["sizes"]))
            if piece in stored.pieces:
                raise CheckpointDamagedError(f"{folder}: the piece of {name} at {piece.offsets} is listed twice")
            if piece.offsets not in places.get(name, {}):
                raise CheckpointDamagedError(f"{folder}: the piece of {name} at {piece.offsets} is nowhere stored")
            stored.pieces[piece] = place = places[name][piece.offsets]
            if (size := piece.numel * dtype.itemsize) > place[2]:
                raise CheckpointDamagedError(
                    f"{folder}: {name}: the part at {list(piece.offsets)} needs {size} bytes, its file has {place[2]}; "
                    "the checkpoint is damaged, copy it again"
                )
        if problem := coverage_problem(stored.shape, stored.pieces):
            raise CheckpointDamagedError(f"{folder}: the pieces of {name} of shape {list(stored.shape)} {problem}")
        original = (flattened.get(name) or {}).get("nd_reformulated_orig_global_shape")
        if original is not None and tuple(original) != stored.shape:
            stored.original = _checked_original(name, stored.shape, tuple(original))
        tensors[name] = stored
    return _Checkpoint(folder, tensors, objects)


def _checked_original(name: str, shape: tuple[int, ...], original: tuple[int, ...]) -> tuple[int, ...]:
    fits = len(shape) == len(original) + 1 and math.prod(shape) == math.prod(original)
    if not fits or any(count <= 0 or total % count for total, count in zip(original, shape)):
        raise CheckpointDamagedError(f"{name} of shape {list(original)} is not {list(shape)} of flat parts")
    return original


def _size(path: Path) -> int:
    """Raises CheckpointDamagedError if the file is missing, unreadable or not regular."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointDamagedError(f"{path}: is missing, or cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointDamagedError(f"{path}: not a regular file")
    return status.st_size
