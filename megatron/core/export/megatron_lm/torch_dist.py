"""Reads Megatron-LM's ``torch_dist``: ``.metadata`` says where rectangles of global tensors lie in ``__R_C.distcp``.

Layers are stacked under one name (``decoder.layers.mlp.linear_fc2.weight``, [layers, …]) or have names of their own. Of
the optimizer's state, ``exp_avg`` and its like are global tensors too (``fully_reshardable``,
``fully_sharded_model_space``; older ones as flat stretches of each rank's part), or flat buckets of one pair of tensor
and pipeline ranks (``dp_reshardable``).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import read_regular_file
from megatron.core.export.interchange import Interchange
from megatron.core.export.megatron_lm.archive import read_archive
from megatron.core.export.megatron_lm.buckets import STATES, unflatten_distributed
from megatron.core.export.megatron_lm.model import build_interchange, find_folder
from megatron.core.export.megatron_lm.names import family_of, is_no_weight, names_of_today
from megatron.core.export.megatron_lm.unpickler import MAX_PICKLE_BYTES, Record, unpickle
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.sharding.rectangles import Rectangle, coverage_problem

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.distcp")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:\d+\.)?state\.(exp_avg_sq|exp_avg|fp32_param|param)\.(.+)")
_STACKED = re.compile(r"(.*\b(?:decoder|encoder)\.layers)\.([a-z_].*)")


@dataclass
class _Stored:
    """A global tensor in pieces, each of which is a file of ``torch.save`` within a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[Rectangle, tuple[Path, int, int]] = field(default_factory=dict)
    original: tuple[int, ...] | None = None
    """The tensor's shape, where ``shape`` counts the parts along each dimension, with one flat part at the end."""

    @property
    def whole(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.shape if self.original is None else self.original

    def read(self, wanted: Rectangle) -> Tensor:
        """A rectangle of the tensor."""
        if self.original is None:
            return self._stored(wanted)
        *counts, flat = self.shape
        local = tuple(total // count for total, count in zip(self.original, counts))
        out = torch.empty(wanted.lengths, dtype=self.dtype)
        for index in itertools.product(*map(range, counts)):
            part = Rectangle(tuple(i * n for i, n in zip(index, local)), local)
            if (shared := part.intersect(wanted)) is not None:
                values = self._stored(Rectangle((*index, 0), (*(1,) * len(counts), flat))).reshape(local)
                shared.of(out, wanted.offsets).copy_(shared.of(values, part.offsets))
        return out

    def read_rows(self, start: int, stop: int) -> Tensor:
        """``[start:stop]`` of its first dimension."""
        return self.read(Rectangle((start, *(0,) * (len(self.whole) - 1)), (stop - start, *self.whole[1:])))

    def lazy(self, layer: int | None = None) -> LazyTensor:
        """It, or one entry of its first dimension."""
        if layer is None:
            return LazyTensor(self.whole, self.dtype, partial(self.read, Rectangle.whole(self.whole)), self.read_rows)
        return LazyTensor(self.whole[1:], self.dtype, lambda: self.read_rows(layer, layer + 1)[0])

    def _stored(self, wanted: Rectangle) -> Tensor:
        """A rectangle of what the pieces make up."""
        out = torch.empty(wanted.lengths, dtype=self.dtype)
        for piece, place in self.pieces.items():
            if (shared := piece.intersect(wanted)) is not None:
                shared.of(out, wanted.offsets).copy_(shared.of(self._piece(piece, place), piece.offsets))
        return out

    def _piece(self, piece: Rectangle, place: tuple[Path, int, int]) -> Tensor:
        value = read_archive(*place)
        if not isinstance(value, LazyTensor) or value.shape != piece.lengths or value.dtype != self.dtype:
            found = f"shape {value.shape} {value.dtype}" if isinstance(value, LazyTensor) else "no tensor"
            raise CheckpointDamagedError(
                f"{place[0]}: {self.name} is {found} at byte {place[1]}, expected {piece.lengths} {self.dtype}"
            )
        return value.read()


@dataclass
class _Checkpoint:
    """A folder's metadata."""

    folder: Path
    tensors: dict[str, _Stored]
    objects: dict[str, tuple[Path, int, int]]

    def state(self) -> dict[str, Any]:
        """What is not sharded: arguments, counters, the schedule."""
        common = self.folder / "common.pt"
        if common.exists() or "common_state" not in {name.partition("/")[0] for name in self.objects}:
            value = read_archive(common)
        else:
            value = self.object("common_state")
        if not isinstance(value, dict):
            raise CheckpointDamagedError(f"{common}: not a dictionary")
        return value

    def object(self, name: str) -> Any:
        """An object that one rank wrote; several make a list, of which the first is taken."""
        found = sorted(key for key in self.objects if key.partition("/")[0] == name)
        value = read_archive(*self.objects[found[0]])
        return value[0] if isinstance(value, list) and len(value) == 1 else value


def load_megatron_torch_dist(
    folder: str | os.PathLike, step: int | None = None, *, padded_vocabulary: bool = False
) -> Interchange:
    """The model, and training state, of a ``--ckpt-format torch_dist`` folder. Tensors are read later, one at a time.

    Args:
        folder: what ``--load`` names, or one ``iter_…`` in it.
        step: the iteration; None: the one that the tracker names.
        padded_vocabulary: keep the rows that pad the vocabulary. Its softmax includes them, so that a run goes on with
            exactly the losses that it would have had; without them it goes on with the true vocabulary.

    Raises:
        CheckpointError: a file is missing, damaged or being written; a crafted pickle; a layer without counterpart.
    """
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
        state["optimizer"] = None if group is None else read_archive(*checkpoint.objects[group])
    family, where = family_of(weights), str(checkpoint.folder)
    weights = names_of_today(weights, family)
    optimizer = {kind: names_of_today(named, family) for kind, named in optimizer.items()}
    return build_interchange(state, weights, optimizer, where=where, padded_vocabulary=padded_vocabulary)


def _add(named: dict[str, LazyTensor], name: str, stored: _Stored) -> None:
    """``stored`` layer by layer where layers are stacked."""
    match = _STACKED.fullmatch(name)
    if match is None:
        named[name] = stored.lazy()
        return
    for layer in range(stored.whole[0]):
        named[f"{match[1]}.{layer}.{match[2]}"] = stored.lazy(layer)


def _open(folder: Path) -> _Checkpoint:
    """The metadata, checked: every piece in a file that is there and long enough, every tensor covered exactly once."""
    path = folder / ".metadata"
    metadata = unpickle(read_regular_file(path, MAX_PICKLE_BYTES, follow=True), str(path))
    try:
        return _parse(metadata, folder)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointDamagedError(f"{path}: not metadata of torch.distributed.checkpoint ({error!r:.100})") from None


def _parse(metadata: Record, folder: Path) -> _Checkpoint:
    sizes: dict[str, int] = {}
    places: dict[str, dict[tuple[int, ...] | None, tuple[Path, int, int]]] = {}
    for index, info in metadata["storage_data"].items():
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if not _FILE_NAME.fullmatch(file):
            raise CheckpointDamagedError(f"{folder}: refuses the file name {file!r:.80}")
        if file not in sizes:
            sizes[file] = _size(folder / file)
        if info.attributes.get("transform_descriptors"):
            raise CheckpointError(f"{folder}: {index['fqn']} is compressed or otherwise transformed")
        if type(start) is not int or type(length) is not int or not 0 <= start <= start + length <= sizes[file]:
            raise CheckpointDamagedError(f"{folder / file}: has {sizes[file]} bytes, {index['fqn']} ends beyond")
        places.setdefault(index["fqn"], {})[index.attributes.get("offset")] = (folder / file, start, length)
    flattened = metadata.attributes.get("mcore_data") or {}
    tensors, objects = {}, {}
    for name, entry in metadata["state_dict_metadata"].items():
        if entry.kind.endswith("BytesStorageMetadata"):
            objects[name] = next(iter(places[name].values()))
            continue
        properties = entry["properties"]
        dtype = properties.attributes["state"][0] if "state" in properties.attributes else properties["dtype"]
        stored = _Stored(name, tuple(entry["size"]), dtype)
        for chunk in entry["chunks"]:
            piece = Rectangle(tuple(chunk["offsets"]), tuple(chunk["sizes"]))
            if piece.offsets not in places.get(name, {}):
                raise CheckpointDamagedError(f"{folder}: the piece of {name} at {piece.offsets} is nowhere stored")
            stored.pieces[piece] = places[name][piece.offsets]
        if not isinstance(dtype, torch.dtype) or (problem := coverage_problem(stored.shape, stored.pieces)):
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
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{path}: is missing") from None
