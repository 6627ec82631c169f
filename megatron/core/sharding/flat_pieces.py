"""A flat stretch of a parameter's local memory as rectangles of the global tensor.

Data-parallel ranks that share out optimizer state (or weights) cut flat memory anywhere. What a checkpoint stores, and
what a norm or a comparison sees, are rectangles: this is the translation, on top of any placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Chunk, ParameterSpec, Zeros, stored_rectangle


class FlatPiece(NamedTuple):
    """A rectangle within a flat stretch of a local tensor."""

    start: int
    """Where it begins, counted from the begin of the stretch."""
    stored: tuple[int, ...]
    """Its lengths in local memory, padding included."""
    chunk: Chunk
    """The rectangle of the true global tensor that it holds."""

    def view(self, flat: Tensor) -> Tensor:
        """This rectangle of ``flat``, the stretch's elements (of a parameter, gradient or moment)."""
        view = flat.detach().reshape(-1)[self.start : self.start + math.prod(self.stored)].view(self.stored)
        for dim, length in enumerate(self.chunk.lengths):
            view = view.narrow(dim, 0, length)
        return view


def flat_pieces(spec: ParameterSpec, groups: ProcessGroups, start: int, stop: int) -> list[FlatPiece]:
    """Elements ``start`` to ``stop`` of this rank's shard, in the order of memory, as rectangles of the global tensor.

    A stretch of a matrix is at most three: the rest of a row, whole rows, the begin of a row. Padding is in none.
    """
    offsets, lengths = stored_rectangle(spec, groups)
    pieces, cursor = [], 0
    for begin, stored in _split_stretch(lengths, start, stop):
        begin = tuple(offset + at for offset, at in zip(offsets, begin))
        true = tuple(max(0, min(length, total - at)) for length, total, at in zip(stored, spec.shape, begin))
        if 0 not in true:
            pieces.append(FlatPiece(cursor, stored, Chunk(begin, true)))
        cursor += math.prod(stored)
    return pieces


def _split_stretch(
    lengths: list[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:  # fmt: skip
    """Elements ``start`` to ``stop`` of a contiguous tensor as (offsets, lengths) of rectangles, in order."""
    if start >= stop:
        return
    if not lengths:
        yield (), ()
        return
    inner = lengths[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        for at, size in _split_stretch(inner, start - last * row, stop - last * row):
            yield (last, *at), (1, *size)
        return
    for at, size in _split_stretch(inner, start - (first - 1) * row, row) if start < first * row else ():
        yield (first - 1, *at), (1, *size)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    for at, size in _split_stretch(inner, 0, stop - last * row):
        yield (last, *at), (1, *size)


def local_stretch(tensor: Tensor) -> tuple[Tensor, int, int]:
    """What this rank stores of a parameter (or gradient) that ``fully_shard`` may have split by rows, and which
    elements (begin, end) of the unsplit one those are; of a plain tensor, all of it. Shares memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0, tensor.numel()
    local = tensor.to_local().detach()
    start = 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            assert placement.is_shard(0), "fully_shard splits rows"
            rows = tensor.shape[0]
            per_rank = -(-rows // tensor.device_mesh.size(axis))
            start = min(per_rank * tensor.device_mesh.get_local_rank(axis), rows) * (tensor.numel() // max(rows, 1))
    return local, start, start + local.numel()


def spec_or_replicated(param: Tensor) -> ParameterSpec:
    """The spec attached by ``parameter()``; a user's own parameter without one is whole on every rank."""
    spec = getattr(param, "spec", None)
    shape = tuple(param.shape)
    return ParameterSpec(shape, Zeros(), ndim=len(shape), stored=shape) if spec is None else spec
