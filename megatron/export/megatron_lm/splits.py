"""Split and merge of tensor-parallel shards along one dimension; gate and value halves are split separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.megatron_lm.names import find_place

Ranks = Mapping[tuple[int, int], Mapping[str, LazyTensor]]
"""(pipeline stage, tensor rank) -> name -> local shard."""


def rank_part(name: str, tensor: LazyTensor, rank: int, tp: int, gated: bool) -> LazyTensor:
    """Return the lazy shard of a global tensor on tensor rank ``rank`` of ``tp``, which must divide the dimension;
    halves of a gated MLP are sharded separately."""
    row = find_place(name).row
    if row.dim is None or tp == 1:
        return tensor
    dim, halves, shape = row.dim, 2 if row.fold == "gate" and gated else 1, list(tensor.shape)
    shape[dim] //= tp

    def read() -> Tensor:
        return tensor.read().unflatten(dim, (halves, tp, -1)).select(dim + 1, rank).flatten(dim, dim + 1)

    return LazyTensor(tuple(shape), tensor.dtype, read)


def join_ranks(ranks: Ranks, tp: int, gated: bool, where: str) -> dict[str, LazyTensor]:
    """Merge the shards of all ranks into lazy global tensors; a name of an earlier stage wins. Raises CheckpointError
    if a shard is missing, or shards differ in shape or dtype."""
    joined: dict[str, LazyTensor] = {}
    for stage in sorted({stage for stage, _ in ranks}):
        for name in ranks[stage, 0]:
            if name not in joined:  # tensors on two stages (shared embeddings) are replicated
                parts = [ranks[stage, rank].get(name) for rank in range(tp)]
                joined[name] = _join(name, [part for part in parts if part is not None], tp, gated, where)
    return joined


def _join(name: str, parts: Sequence[LazyTensor], tp: int, gated: bool, where: str) -> LazyTensor:
    """Gate and up halves are joined separately. Of a replicated tensor returns the first shard; values are not
    compared."""
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
    halves = 2 if row.fold == "gate" and gated else 1
    return LazyTensor(tuple(shape), first.dtype, partial(_joined, parts, row.dim, halves))


def _joined(parts: Sequence[LazyTensor], dim: int, halves: int) -> Tensor:
    pieces = [part.read().unflatten(dim, (halves, -1)) for part in parts]
    return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)
