"""Writer of ``torch_dist`` checkpoints for Megatron-LM's loader: one rank's file, streamed one layer at a time.

As in Megatron-LM, layers are stacked under one name unless they differ (dense and MoE layers). Its loader unpickles
``common.pt`` and ``.metadata``, so both are written with torch's classes."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import RELEASE, TRACKER, checkpoint_directory
from megatron.core.dist_checkpointing.writer import make_durable_folder, write_file, write_file_atomically
from megatron.core.safe_files import create_file, fsync_path
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.interchange import COUNTER, Interchange, Settings
from megatron.export.megatron_lm.names import (
    LAYER,
    REGISTERED_TWICE,
    SECTIONS,
    VOCABULARY,
    padded_size,
    reorder_gates,
    section_rows,
    their_name,
)

_FILE = "__0_0.distcp"
_THEIR_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "main_param": "fp32_param"}
_WITH_EXTRA_STATE = (
    "linear_qkv",
    "linear_q",
    "linear_kv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "in_proj",
    "out_proj",
)
_LAYER_NUMBER = re.compile(r"^((?:.*\.)?(?:en|de)coder\.layers)\.(\d+)\.(.*)$")


@dataclass
class _Piece:
    source: LazyTensor
    shape: tuple[int, ...]
    """Megatron-LM's shape with vocabulary padding, without the layer dimension."""
    layer: int | None

    def read(self) -> Tensor:
        """Pad the vocabulary with zeros; a layer of a stack gets a leading dim of 1. Not cached."""
        tensor = self.source.read()
        if tensor.shape[0] < self.shape[0] and tensor.shape[1:] == self.shape[1:]:  # the vocabulary's rows and biases
            padding = tensor.new_zeros((self.shape[0] - tensor.shape[0], *tensor.shape[1:]))
            tensor = torch.cat([tensor, padding])
        tensor = tensor.reshape(self.shape)
        return tensor if self.layer is None else tensor[None]


def save_megatron_torch_dist(interchange: Interchange, folder: str | os.PathLike) -> None:
    """Write ``<folder>/iter_…`` (``release`` without training state) and its tracker, for Megatron-LM's loader.

    One layer is in memory at a time. Optimizer state is written for the non-distributed optimizer. RNG states are not
    written: resuming requires --no-load-rng. Raises CheckpointError: the checkpoint exists, or a tensor has no
    counterpart in Megatron-LM."""
    objects = interchange.objects
    which = objects["iteration"] if "train_state" in objects else RELEASE
    target = Path(checkpoint_directory(folder, which))
    if (target / ".metadata").exists():
        raise CheckpointError(f"{target}: exists already; choose another folder, or remove it")
    make_durable_folder(target)
    with create_file(target / _FILE) as file:
        metadata = _write_tensors(_stacked(interchange), file)
        file.flush()
        os.fsync(file.fileno())
    common = io.BytesIO()
    torch.save(_common(interchange), common)
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    for path, data in (
        (target / "common.pt", common.getvalue()),
        (target / "metadata.json", json.dumps(backends).encode()),
    ):
        path.unlink(missing_ok=True)
        write_file(path, data)
        fsync_path(target)
    # .metadata makes the folder a checkpoint: write it after all other files, and the tracker after it
    write_file_atomically(target / ".metadata", pickle.dumps(metadata))
    write_file_atomically(Path(folder) / TRACKER, str(which).encode())


def _write_tensors(stacked: Mapping[str, list[_Piece]], file: BinaryIO) -> Metadata:
    """Append one ``torch.save`` file per piece, one in memory at a time; return the metadata with their offsets."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, pieces in stacked.items():
        chunks = []
        for piece in pieces:
            tensor, start = piece.read().contiguous(), file.tell()
            torch.save(tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor, file)
            offsets = torch.Size([piece.layer or 0, *(0,) * (tensor.ndim - 1)][: tensor.ndim])
            chunks.append(ChunkStorageMetadata(offsets, tensor.shape))
            storage[MetadataIndex(name, offsets)] = _StorageInfo(_FILE, start, file.tell() - start)
        layers = () if pieces[0].layer is None else (len(pieces),)
        properties = TensorProperties(dtype=pieces[0].source.dtype)
        tensors[name] = TensorStorageMetadata(properties, torch.Size((*layers, *pieces[0].shape)), chunks)
        for module in _WITH_EXTRA_STATE:
            weight = name.removesuffix(".z")  # one of the sections
            if weight.endswith(f".{module}.weight") and "optimizer." not in name:
                _write_extra_states(weight.removesuffix(".weight"), len(pieces), file, tensors, storage)
        if name.endswith("output_layer.bias") and "optimizer." not in name:  # required by the loader for BERT and T5
            _write_extra_states(name.removesuffix(".bias"), 1, file, tensors, storage)
    return Metadata(tensors, None, storage)


def _write_extra_states(
    module: str, layers: int, file: BinaryIO, tensors: dict[str, object], storage: dict[MetadataIndex, _StorageInfo]
) -> None:
    """The loader requires empty extra states (quantization state in Transformer Engine) of every layer."""
    names = [module.replace("linear_proj", "core_attention"), module] if module.endswith("linear_proj") else [module]
    for name in names:
        for layer in range(layers):
            key, start = f"{name}._extra_state/shard_{layer}_{layers}", file.tell()
            torch.save([None], file)
            tensors[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = _StorageInfo(_FILE, start, file.tell() - start)


def _stacked(interchange: Interchange) -> dict[str, list[_Piece]]:
    """Return Megatron-LM name -> pieces in layer order; the layers of a stack share one name if all have the same
    tensors. Raises CheckpointError for a tensor that Megatron-LM does not have."""
    named: dict[str, _Piece] = {}
    for name, tensor in interchange.tensors.items():
        prefix, _, inner = name.partition(".")
        if prefix == "model":
            named |= _their_piece("", inner, tensor, interchange)
        elif prefix == "optimizer":
            kind, _, inner = inner.partition(".")
            if kind not in _THEIR_KINDS:
                raise CheckpointError(f"{name}: optimizer state that Megatron-LM does not support")
            named |= _their_piece(f"optimizer.state.{_THEIR_KINDS[kind]}.", inner, tensor, interchange)
    matches = {name: _LAYER_NUMBER.fullmatch(name) for name in named}
    kinds: dict[str, dict[int, set[str]]] = {}
    for match in matches.values():
        if match:
            kinds.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    uniform = {stack for stack, layers in kinds.items() if all(layer == layers.get(0) for layer in layers.values())}
    if interchange.settings.get("hybrid_layer_pattern"):
        uniform = set()
    stacked: dict[str, list[_Piece]] = {}
    for name, piece in named.items():
        match = matches[name]
        if match and match[1] in uniform:
            layer = _Piece(piece.source, piece.shape, int(match[2]))
            stacked.setdefault(f"{match[1]}.{match[3]}", []).append(layer)
        else:
            stacked[name] = [piece]
    return {name: sorted(pieces, key=lambda piece: piece.layer or 0) for name, pieces in stacked.items()}


def _their_piece(prefix: str, name: str, tensor: LazyTensor, interchange: Interchange) -> dict[str, _Piece]:
    """Empty for router counters, two names for weights that Megatron-LM's T5 registers twice."""
    if name.endswith(COUNTER):
        return {}
    layer = f"model.{match[1]}" if (match := LAYER.fullmatch(name)) else ""
    their, row = their_name(name, f"{layer}mlp.router.weight" in interchange.tensors)
    if f"{layer}self_attention.in_proj.weight" in interchange.tensors:
        their = their.replace(".linear_qkv.layer_norm_", ".in_proj.layer_norm_")
    if interchange.settings.get("hybrid_layer_pattern"):
        their = their.replace("decoder.final_layernorm.", "decoder.final_norm.")
    if row.fold in SECTIONS:
        sizes = [size // tensor.shape[0] for size in section_rows(row, interchange.settings)]
        sections = [_section(tensor, sizes, index) for index in range(len(sizes))]
        names = [f"{prefix}{their}.{suffix}" for suffix in SECTIONS[row.fold]]
        return {name: _Piece(section, section.shape, None) for name, section in zip(names, sections)}
    if row.fold == "groups":
        tensor = reorder_gates(tensor, interchange.settings, to_local=False)
    start, dims = (tensor.shape[:1], tensor.shape[1:]) if row.experts else ((), tensor.shape)
    if row.fold == "groups" or (row.fold == "gate" and len(dims) == (3 if name.endswith("weight") else 2)):
        dims = (dims[0] * dims[1], *dims[2:])
    if name in VOCABULARY:
        dims = (_padded(interchange.settings, dims[0]), *dims[1:])
    twice = REGISTERED_TWICE.get(their) if interchange.settings.get("model_family") == "t5" else None
    names = [their] if twice is None else [twice] if prefix else [their, twice]
    return {prefix + name: _Piece(tensor, (*start, *dims), None) for name in names}


def _section(tensor: LazyTensor, sizes: Sequence[int], index: int) -> LazyTensor:
    shape = (tensor.shape[0] * sizes[index], *tensor.shape[2:])
    return LazyTensor(shape, tensor.dtype, lambda: tensor.read().split(sizes, 1)[index].flatten(0, 1))


def _padded(settings: Settings, rows: int) -> int:
    return padded_size(rows, settings.get("make_vocab_size_divisible_by") or 128)


def _common(interchange: Interchange) -> dict[str, object]:
    """Return the contents of ``common.pt``. Requires a word embedding."""
    settings, objects = interchange.settings, interchange.objects
    args = {("num_experts" if name == "num_moe_experts" else name): value for name, value in settings.items()}
    rows = next(t.shape[0] for name, t in interchange.tensors.items() if name.endswith("word_embeddings.weight"))
    args["padded_vocab_size"] = _padded(settings, rows)
    counters = objects.get("train_state", {})
    args |= {name: value for name, value in counters.items() if name.endswith("_samples")}
    args["iteration"] = iteration = objects.get("iteration", 0)
    state: dict[str, object] = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": iteration}
    state["num_floating_point_operations_so_far"] = counters.get("floating_point_operations", 0)
    if "scheduler" in objects:
        left_out = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
        schedule = objects["scheduler"]
        state["opt_param_scheduler"] = {key: schedule[key] for key in schedule if key not in left_out}
    if any(name.startswith("optimizer.") for name in interchange.tensors):
        step = objects.get("optimizer", {}).get("step", iteration)
        optimizer = {"state": {"common_step": torch.tensor(float(step))}, "param_groups": _groups(settings, step)}
        half = settings.get("bf16") or settings.get("fp16")
        state["optimizer"] = {"optimizer": optimizer} if half else optimizer
    return state


def _groups(settings: Settings, step: int) -> list[dict[str, object]]:
    """Two groups: weights; biases and norms without weight decay. Missing settings take Megatron-LM's defaults."""
    lr, decay = settings.get("lr") or 0.0, settings.get("weight_decay") or 0.0
    betas = (settings.get("adam_beta1", 0.9), settings.get("adam_beta2", 0.999))
    shared = {
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "lr": lr,
        "max_lr": lr,
        "min_lr": settings.get("min_lr") or 0.0,
        "betas": betas,
        "eps": settings.get("adam_eps", 1e-8),
        "step": step,
    }
    return [{**shared, "wd_mult": mult, "weight_decay": decay * mult} for mult in (1.0, 0.0)]
