"""Conversion between ``Interchange`` and native checkpoints or plain safetensors with native names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.dist_checkpointing.manifest import FORMAT, FORMAT_VERSION, MANIFEST, encode
from megatron.core.dist_checkpointing.reader import CheckpointReader, misfits
from megatron.core.dist_checkpointing.writer import copy_asset, write_file
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.sharding.rectangles import Rectangle
from megatron.core.sharding.sharded_tensor import DTYPE_NAMES, DTYPES, ShardedTensor
from megatron.export.files import INDEX, MAX_FILE_BYTES, Target, in_files, read_safetensors, read_shards
from megatron.export.interchange import Interchange, check_names

SETTINGS = "settings.json"


def load_native(checkpoint_dir: str | os.PathLike) -> Interchange:
    """Open a checkpoint directory ``…/iter_0001000``: weights, optimizer state and objects, without RNG states.

    Tensors are read lazily; each read verifies the checksums of its blocks. Raises CheckpointError: the manifest is
    missing or damaged; reading a damaged tensor raises it later."""
    reader = CheckpointReader(checkpoint_dir)
    check_names(reader.names, checkpoint_dir)
    args = reader.objects.get("args")

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        shape, dtype = reader.shape(name), DTYPES[reader.manifest["tensors"][name]["dtype"]]
        part = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        reader.read_into(ShardedTensor(name, part, shape, (start, *(0 for _ in shape[1:]))))
        return part

    tensors = {
        name: LazyTensor(
            reader.shape(name),
            DTYPES[reader.manifest["tensors"][name]["dtype"]],
            partial(reader.read, name),
            partial(rows, name),
        )
        for name in reader.names
        if not name.startswith(("rng.", "fp8."))  # states of a run, without use elsewhere
    }
    assets = {name: reader.directory / name for name in reader.manifest["assets"]}
    return Interchange(dict(args) if isinstance(args, dict) else {}, tensors, dict(reader.objects), assets)


def save_native(
    interchange: Interchange,
    target: Target,
    name: str,
    objects: Mapping[str, object],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the checkpoint directory ``name`` with the JSON ``objects`` below ``target``; does not publish ``target``.

    Resumes an earlier attempt: complete files are kept. One tensor is in memory at a time. A file exceeds
    ``max_file_bytes`` only if a single tensor does."""
    folder = target.folder / name
    folder.mkdir(exist_ok=True)
    files: dict[str, object] = {}
    tensors: dict[str, object] = {}
    for stem in dict.fromkeys(key.partition(".")[0] for key in interchange.tensors):
        members = {key: tensor for key, tensor in interchange.tensors.items() if key.partition(".")[0] == stem}
        for number, group in enumerate(in_files(members, max_file_bytes)):
            file = f"{stem}_{number:05d}.safetensors"
            entry = target.write(f"{name}/{file}", group, {"format": "pt"})
            files[file] = {key: entry[key] for key in ("bytes", "header_bytes", "header_crc32")}
            for key, tensor in group.items():
                tensors[key] = _stored(key, tensor, file, *entry["tensors"][key])
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "run_id": uuid.uuid4().hex,
        "world_size": 1,
        "objects": dict(objects),
        "files": files,
        "tensors": tensors,
        "assets": {asset: copy_asset(source, folder / asset) for asset, source in interchange.assets.items()},
    }
    write_file(folder / MANIFEST, encode(manifest))


def _stored(key: str, tensor: LazyTensor, file: str, start: int, blocks: list[int]) -> dict[str, object]:
    """One chunk; none if the tensor is empty."""
    shape, chunk = list(tensor.shape), {"offsets": [0] * len(tensor.shape), "shape": list(tensor.shape)}
    chunks = [{**chunk, "file": file, "key": key, "start": start, "crc32": blocks}] if 0 not in shape else []
    return {"shape": shape, "dtype": DTYPE_NAMES[tensor.dtype], "chunks": chunks}


def load_safetensors(folder: str | os.PathLike) -> Interchange:
    """Open a safetensors file, or a folder of such files, with native tensor names.

    In a folder, reads the files of the index, or all files without an index. Settings come from ``settings.json`` if it
    exists. Tensors are read lazily. Raises CheckpointError: no file exists, a shard is missing, or a tensor name occurs
    twice."""
    folder = Path(folder)
    if not folder.is_dir():
        return Interchange({}, read_safetensors(folder))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: holds no *.safetensors")
    tensors: dict[str, LazyTensor] = {}
    if (folder / INDEX).exists():
        tensors, files = read_shards(folder / INDEX), []
    for file in files:
        shard = read_safetensors(file)
        if twice := shard.keys() & tensors.keys():
            raise CheckpointDamagedError(f"{file}: {min(twice)} is in another file too")
        tensors |= shard
    settings = folder / SETTINGS
    return Interchange(read_json(settings) if settings.exists() else {}, tensors)


def save_safetensors(interchange: Interchange, target: Target, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write safetensors files of bounded size with native names, and ``settings.json``; does not publish ``target``."""
    target.write_shards(interchange.tensors, max_file_bytes)
    target.write_json(SETTINGS, dict(sorted(interchange.settings.items())))


class InterchangeReader:
    """Reader of tensor shards from an :class:`Interchange`, with the interface of ``CheckpointReader``. Memory is
    bounded by the rows of one shard, because one tensor is read at a time."""

    num_threads = 1

    def __init__(self, interchange: Interchange, directory: str | os.PathLike) -> None:
        self.tensors, self.directory = interchange.tensors, Path(directory)

    @property
    def names(self) -> list[str]:
        """Sorted names of all tensors."""
        return sorted(self.tensors)

    def misfits(self, tensors: Iterable[ShardedTensor]) -> list[str]:
        """Describe the ``tensors`` that are missing here or have another shape or dtype kind."""
        return misfits({name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}, tensors)

    @torch.no_grad()
    def read_into(self, tensor: ShardedTensor) -> None:
        """Copy this rank's shard into ``tensor.local`` in place, cast to its dtype; reads only the shard's rows if the
        source can. Checks neither names nor shapes; see :meth:`misfits`."""
        local, lengths = tensor.local.detach(), tuple(tensor.local.shape)
        if not local.ndim:
            local.copy_(self.tensors[tensor.name].read())
        elif local.numel():
            first = tensor.offsets[0]
            rows = self.tensors[tensor.name].rows(first, first + lengths[0])
            local.copy_(Rectangle((0, *tensor.offsets[1:]), lengths).of(rows))
