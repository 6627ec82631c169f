"""A flat stretch of a parameter's local memory as rectangles of the global tensor.

Data-parallel ranks that share out optimizer state (or weights) cut flat memory anywhere. What a checkpoint stores, and
what a norm or a comparison sees, are rectangles: this is the translation, on top of any placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import ParameterSpec, stored_rectangle
from megatron.core.sharding.rectangles import Rectangle


def flat_pieces(
    spec: ParameterSpec, groups: ProcessGroups, stretch: tuple[int, int], flat: Tensor
) -> Iterator[tuple[Rectangle, Tensor]]:
    """A stretch (begin, end) of this rank's shard, in the order of memory, as rectangles of the global tensor.

    With each comes its view of ``flat``, which holds the stretch's elements in any shape: weights, gradients, moments.
    A stretch of a matrix is at most three: the rest of a row, whole rows, the begin of a row. Padding is in none.
    """
    shard = stored_rectangle(spec, groups)
    memory, cursor = flat.detach().reshape(-1), 0
    for at, lengths in _split_stretch(list(shard.lengths), *stretch):
        stored = Rectangle(tuple(offset + begin for offset, begin in zip(shard.offsets, at)), lengths)
        held, size = stored.within(spec.shape), stored.numel
        if held.numel:
            yield held, held.of(memory[cursor : cursor + size].view(lengths), stored.offsets)
        cursor += size


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
