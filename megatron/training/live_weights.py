"""Weights of a live, sharded model as Hugging Face tensors, for inference engines that RL programs keep up to date.

Names, shapes and values are those of a folder that ``save_hf`` writes. Tensors are gathered in buckets on the device,
so that a rank holds at most one bucket besides its shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.stage_model import unwrapped
from megatron.core.sharding.rectangles import Rectangle, coverage_problem
from megatron.core.sharding.sharded_tensor import DTYPE_NAMES, DTYPES, ShardedTensor, module_tensors
from megatron.export.hf.conversion import HFTensor, placements
from megatron.export.hf.family import complete
from megatron.export.hf.registry import family_for
from megatron.export.hf.writer import keeps_dtype
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import config_to_dict

BUCKET_BYTES = 1 << 30
_ALIGNED = 16
"""Alignment of tensors in a bucket, in bytes."""


class _Unit(NamedTuple):
    """Part of a bucket: a tensor of the model, or one expert's row of it."""

    name: str
    rectangle: Rectangle
    parts: tuple[HFTensor, ...]


class _Piece(NamedTuple):
    """Rectangle of a tensor that this rank contributes."""

    local: Tensor
    rectangle: Rectangle


@dataclass
class _Catalog:
    """Tensors of all ranks."""

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    owned: dict[str, list[_Piece]] = field(default_factory=dict)
    """Pieces that this rank contributes: of equal pieces, the first rank's."""

    def num_bytes(self, unit: _Unit) -> int:
        size = unit.rectangle.numel * self.dtypes[unit.name].itemsize
        return -(-size // _ALIGNED) * _ALIGNED


def hf_weights(
    cfg: PretrainConfig,
    model: Sequence[nn.Module],
    *,
    vocab_size: int,
    groups: ProcessGroups,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    family: str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor on the model's device) of all weights, equal and in the same order on all
    ranks. Collective: every rank must read all tensors, in step with the others. Later changes of the weights do not
    change tensors that were yielded.

    Args:
        model: this rank's model chunks, wrapped or not; also with sharded weights (FSDP).
        vocab_size: size without padding (``task.vocab_size``).
        bucket_bytes: memory of a bucket; a larger tensor, or expert, has a bucket of its own.
        dtype: dtype of the results; None: the model's. The balancing biases of experts keep theirs.
        family: Hugging Face ``model_type``; None: the first that fits.

    Raises:
        UserError: no family fits the settings, or weights and settings do not match."""
    settings = complete({**config_to_dict(cfg.flat), "vocab_size": vocab_size})
    chosen = family_for(settings, only=family)
    plan = placements(chosen, settings)
    shapes = {f"model.{each.name}": each.shape for each in plan}
    catalog = _catalog(model, shapes, groups)
    device = next(parameter.device for chunk in model for parameter in chunk.parameters())
    copies: dict[str, list[str]] = {}
    for name, source in chosen.copies(settings).items():
        copies.setdefault(source, []).append(name)
    units = [
        _Unit(f"model.{each.name}", _rectangle(each.shape, expert), tuple(parts))
        for each in plan
        for expert, parts in groupby(each.parts, lambda part: part.expert)
    ]
    for bucket in _buckets(units, catalog, bucket_bytes):
        for name, tensor in _gathered(bucket, catalog, groups, device):
            tensor = tensor if dtype is None or keeps_dtype(name) else tensor.to(dtype)
            for each in (name, *copies.get(name, ())):
                yield each, tensor
            del tensor  # else this bucket would stay while the next one is gathered
    kind = dtype or catalog.dtypes["model.embedding.word_embeddings.weight"]
    for name, shape in chosen.blank(settings).items():
        yield name, torch.zeros(shape, dtype=kind, device=device)


def _rectangle(shape: Sequence[int], expert: int | None) -> Rectangle:
    full = Rectangle.whole(shape)
    return full if expert is None else Rectangle((expert, *full.offsets[1:]), (1, *full.lengths[1:]))


def _catalog(model: Sequence[nn.Module], shapes: dict[str, tuple[int, ...]], groups: ProcessGroups) -> _Catalog:
    """Exchange the rectangles of all ranks. Raises UserError if they are not the tensors of ``shapes``."""
    local: list[ShardedTensor] = []
    for chunk in model:
        if isinstance(chunk, DataParallel):
            chunk.gather_exact_weights()
        tensors = module_tensors(unwrapped(chunk), groups=groups, prefix="model.", rounded=True)
        local += [piece for piece in tensors.values() if piece.name in shapes]
    mine = [(piece.name, tuple(piece.rectangle), DTYPE_NAMES[piece.local.dtype], piece.global_shape) for piece in local]
    everything: list[Any] = [mine]
    if groups.world.size > 1:
        everything = [None] * groups.world.size
        dist.all_gather_object(everything, mine, group=groups.world.handle)
    catalog, owners = _Catalog(), dict[tuple[str, Rectangle], int]()
    for rank, entries in enumerate(everything):
        for name, rectangle, dtype, shape in entries:
            if tuple(shape) != shapes[name]:
                raise UserError(f"{name}: has shape {tuple(shape)}, the settings {shapes[name]}")
            owners.setdefault((name, Rectangle(*map(tuple, rectangle))), rank)
            catalog.dtypes.setdefault(name, DTYPES[dtype])
    for name, shape in shapes.items():
        if problem := coverage_problem(shape, [place for owned, place in owners if owned == name]):
            raise UserError(f"{name}: the ranks {problem}; the settings and the model do not fit")
    for piece in local:
        if owners[piece.name, piece.rectangle] == groups.world.rank:
            catalog.owned.setdefault(piece.name, []).append(_Piece(piece.local.detach(), piece.rectangle))
    return catalog


def _buckets(units: Sequence[_Unit], catalog: _Catalog, bucket_bytes: int) -> Iterator[list[_Unit]]:
    """Yield consecutive units of at most ``bucket_bytes``, at least one at a time."""
    bucket: list[_Unit] = []
    size = 0
    for unit in units:
        more = catalog.num_bytes(unit)
        if bucket and size + more > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(unit)
        size += more
    if bucket:
        yield bucket


def _gathered(
    bucket: Sequence[_Unit], catalog: _Catalog, groups: ProcessGroups, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of ``bucket``: an all-reduce adds all ranks' bits between zeros."""
    sizes = [catalog.num_bytes(unit) for unit in bucket]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    full = [
        part[: unit.rectangle.numel * catalog.dtypes[unit.name].itemsize]
        .view(catalog.dtypes[unit.name])
        .view(unit.rectangle.lengths)
        for unit, part in zip(bucket, memory.split(sizes))
    ]
    for unit, target in zip(bucket, full):
        for piece in catalog.owned.get(unit.name, ()):
            if (common := unit.rectangle.intersect(piece.rectangle)) is not None:
                source = common.of(piece.local, piece.rectangle.offsets)
                common.of(target, unit.rectangle.offsets).copy_(source)
    if groups.world.size > 1:
        dist.all_reduce(memory.view(torch.int64), group=groups.world.handle)
    for unit, tensor in zip(bucket, full):
        for part in unit.parts:
            yield part.name, part.extract(tensor)
