"""Split and merge of tensor-parallel shards along one dimension; sections, such as gate and value, are split
separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.interchange import Settings
from megatron.export.megatron_lm.names import find_place, section_rows

Ranks = Mapping[tuple[int, int], Mapping[str, LazyTensor]]
"""(pipeline stage, tensor rank) -> name -> local shard."""


def rank_part(name: str, tensor: LazyTensor, rank: int, tp: int, args: Settings) -> LazyTensor:
    """Return the lazy shard of a global tensor on tensor rank ``rank`` of ``tp``, which must divide the dimension;
    ``args`` give the sections of the model of its run."""
    row = find_place(name).row
    if row.dim is None or tp == 1:
        return tensor
    dim, sizes, shape = row.dim, section_rows(row, args), list(tensor.shape)
    shape[dim] //= tp

    def read() -> Tensor:
        return torch.cat([part.chunk(tp, dim)[rank] for part in _sections(tensor.read(), dim, sizes)], dim)

    return LazyTensor(tuple(shape), tensor.dtype, read)


def join_ranks(ranks: Ranks, tp: int, args: Settings, where: str) -> dict[str, LazyTensor]:
    """Merge the shards of all ranks into lazy global tensors; a name of an earlier stage wins. Raises CheckpointError
    if a shard is missing, or shards differ in shape or dtype."""
    joined: dict[str, LazyTensor] = {}
    for stage in sorted({stage for stage, _ in ranks}):
        for name in ranks[stage, 0]:
            if name not in joined:  # tensors on two stages (shared embeddings) are replicated
                parts = [ranks[stage, rank].get(name) for rank in range(tp)]
                joined[name] = _join(name, [part for part in parts if part is not None], tp, args, where)
    return joined


def _join(name: str, parts: Sequence[LazyTensor], tp: int, args: Settings, where: str) -> LazyTensor:
    """Sections are joined separately. Of a replicated tensor returns the first shard; values are not compared."""
    row, first = find_place(name).row, parts[0]
    if len(parts) != tp or any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts):
        shapes = [list(part.shape) for part in parts]
        raise CheckpointError(f"{where}: {name} has shapes {shapes} on {tp} tensor-parallel ranks, expected equal ones")
    if row.dim is None or tp == 1:
        return first
    shape = list(first.shape)
    if row.dim >= len(shape):
        raise CheckpointError(f"{where}: {name} has shape {shape}, expected more dimensions")
    shape[row.dim] *= tp
    return LazyTensor(tuple(shape), first.dtype, partial(_joined, parts, row.dim, section_rows(row, args)))


def _joined(parts: Sequence[LazyTensor], dim: int, sizes: Sequence[int]) -> Tensor:
    pieces = [_sections(part.read(), dim, sizes) for part in parts]
    return torch.cat([torch.cat(section, dim) for section in zip(*pieces)], dim)


def _sections(tensor: Tensor, dim: int, sizes: Sequence[int]) -> Sequence[Tensor]:
    return tensor.split([tensor.shape[dim] * size // sum(sizes) for size in sizes], dim)
