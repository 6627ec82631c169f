"""Conversion of a flat range of a parameter's local memory to rectangles of the global tensor.

Sharded optimizer state splits flat memory at any element, while checkpoints, norms and comparisons work on rectangles.
The conversion works for every placement."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import ParameterSpec, stored_rectangle
from megatron.core.sharding.rectangles import Rectangle


def flat_pieces(
    spec: ParameterSpec, groups: ProcessGroups, span: tuple[int, int], flat: Tensor
) -> Iterator[tuple[Rectangle, Tensor]]:
    """Yield (rectangle of the global tensor, its values) for the element range ``span`` (begin, end) of this rank's
    shard, in memory order without padding. ``flat``: these elements in any shape (weights, gradients or moments);
    values are views of it if it is contiguous. A range of a matrix gives at most three rectangles."""
    shard = stored_rectangle(spec, groups)
    memory, cursor = flat.detach().reshape(-1), 0
    for at, lengths in _split_flat_range(list(shard.lengths), *span):
        stored = Rectangle(tuple(offset + begin for offset, begin in zip(shard.offsets, at)), lengths)
        local, size = stored.within(spec.shape), stored.numel
        # the cursor also moves over padding, whose rectangles are not yielded
        if local.numel:
            yield local, local.of(memory[cursor : cursor + size].view(lengths), stored.offsets)
        cursor += size


def _split_flat_range(lengths: list[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, lengths) of rectangles that cover the range in memory order; of a matrix at most three."""
    if start >= stop:
        return
    if not lengths:
        yield (), ()
        return
    inner = lengths[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row  # full rows
    if first > last:  # within one row
        for at, size in _split_flat_range(inner, start - last * row, stop - last * row):
            yield (last, *at), (1, *size)
        return
    for at, size in _split_flat_range(inner, start - (first - 1) * row, row) if start < first * row else ():
        yield (first - 1, *at), (1, *size)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    for at, size in _split_flat_range(inner, 0, stop - last * row):
        yield (last, *at), (1, *size)


def flat_range(tensor: Tensor) -> tuple[Tensor, int, int]:
    """Return (local shard, begin, end): the shard's element range in the unsharded parameter or gradient, flat. A
    ``DTensor`` must be split by rows, as ``fully_shard`` does (asserted); the last ranks may have an empty range. A
    plain tensor is returned in full, with (0, numel). The result is detached and shares memory. No collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0, tensor.numel()
    local = tensor.to_local().detach()
    local = getattr(local, "plain", local)  # of a weight that is gathered in fp8
    start = 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            assert placement.is_shard(0), "fully_shard splits rows"
            rows = tensor.shape[0]
            per_rank = -(-rows // tensor.device_mesh.size(axis))
            start = min(per_rank * tensor.device_mesh.get_local_rank(axis), rows) * (tensor.numel() // max(rows, 1))
    return local, start, start + local.numel()
