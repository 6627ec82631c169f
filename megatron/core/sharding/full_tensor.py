"""Gather shards of a parameter, gradient or moment to the full global tensor, and take this rank's shard from it.

For update rules that own matrices: the shard may be split over the axes of the parameter's mesh (tensor and expert
parallelism) and by rows over data-parallel ranks (FSDP). The order of elements is the global order, so that results do
not depend on the layout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from megatron.core.groups.collective_names import all_gather
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import Nested, Shard, local_rectangle, spec_or_replicated, stored_rectangle
from megatron.core.sharding.rectangles import Rectangle


def gather_full(flat: Tensor, shard: ParameterShard, groups: ProcessGroups, keep: Collection[str] = ()) -> Tensor:
    """Return the global tensor in its logical shape without padding (for a ``SubTensor``: the part). Every rank passes
    the elements of its ``shard`` as ``flat``, in any shape. Collective: an all-gather over ``shard.rows_over`` and one
    over every axis that splits the parameter, except the axes ``keep``: dims that these split, with ``Shard`` and
    without padding, stay local. Asserts a full shard or ``rows_over``. May return a view."""
    spec = spec_or_replicated(shard.parameter)
    local = flat.reshape(-1)
    if shard.rows_over is not None and shard.rows_over.size > 1:
        local = _gather_rows(local, shard, shard.rows_over)
    else:
        assert shard.is_full, "a matrix is cut between ranks"
    full = local.view(stored_rectangle(spec, groups).lengths)
    for axis, placement in reversed([*spec.mesh.items()]):  # a later axis splits the shards of an earlier one
        if axis not in keep:
            full = _join(full, placement, getattr(groups, axis))
    return full[tuple(slice(length) for length in (spec.shape if spec.part is None else spec.part.rectangle.lengths))]


def take_shard(full: Tensor, shard: ParameterShard, groups: ProcessGroups, keep: Collection[str] = ()) -> Tensor:
    """Return this rank's elements of the result of :func:`gather_full` with the same ``keep``, in the shape of
    ``shard.values``; padding is zero. No collective."""
    spec = spec_or_replicated(shard.parameter)
    stored, unpadded = stored_rectangle(spec, groups), local_rectangle(spec, groups)
    origin = [0] * len(unpadded.offsets) if spec.part is None else list(spec.part.rectangle.offsets)
    for axis in keep:
        if isinstance(placement := spec.mesh.get(axis), Shard):
            origin[placement.dim] = stored.offsets[placement.dim]
    local = unpadded.of(full, origin)
    if unpadded.lengths != stored.lengths:
        padded = full.new_zeros(stored.lengths)
        Rectangle.whole(unpadded.lengths).of(padded).copy_(local)
        local = padded
    return local.reshape(-1)[shard.start : shard.stop].view(shard.values.shape)


def _gather_rows(flat: Tensor, shard: ParameterShard, group: Group) -> Tensor:
    """Return this rank's mesh shard, flat: all-gather of the rows that ``fully_shard`` has split into equal chunks. The
    last ranks may have fewer rows or none."""
    shape = shard.parameter.shape
    chunk = -(-shape[0] // group.size) * (shape.numel() // shape[0])
    sent = flat.new_zeros(chunk)
    sent[: flat.numel()] = flat
    received = flat.new_empty(chunk * group.size)
    all_gather(received, sent, group=group.handle)
    return received[: shape.numel()]


def _join(local: Tensor, placement: Placement | Nested, group: Group) -> Tensor:
    """All-gather and join the shards: a new tensor; ``local`` itself for one rank or a replicated placement."""
    if group.size == 1 or not is_split(placement):
        return local
    received = local.new_empty(group.size * local.numel())
    all_gather(received, local.reshape(-1), group=group.handle)
    return join_shards([shard.view(local.shape) for shard in received.chunk(group.size)], placement)


def is_split(placement: Placement | Nested) -> bool:
    """Whether ranks of the axis hold different elements."""
    return any(isinstance(term, Shard) for term in _terms(placement))


def join_shards(shards: Sequence[Tensor], placement: Placement | Nested) -> Tensor:
    """Join the ``shards`` of all ranks along the dims of ``placement``. Uses the first of replicated copies."""
    inner_size = placement.inner_size if isinstance(placement, Nested) else len(shards)
    outer, inner = _terms(placement)[0], _terms(placement)[-1]
    joined = [_concatenate(shards[at : at + inner_size], inner) for at in range(0, len(shards), inner_size)]
    return _concatenate(joined, outer)


def split_shards(full: Tensor, placement: Placement | Nested, size: int) -> list[Tensor]:
    """Return the shard of each of ``size`` ranks, views; inverse of :func:`join_shards`."""
    inner_size = placement.inner_size if isinstance(placement, Nested) else size
    outer, inner = _terms(placement)[0], _terms(placement)[-1]
    blocks = _chunks(full, outer, size // inner_size)
    return [shard for block in blocks for shard in _chunks(block, inner, inner_size)]


def _terms(placement: Placement | Nested) -> tuple[Placement, ...]:
    return (placement.outer, placement.inner) if isinstance(placement, Nested) else (placement,)


def _concatenate(shards: Sequence[Tensor], placement: Placement) -> Tensor:
    return torch.cat([*shards], dim=placement.dim) if isinstance(placement, Shard) and len(shards) > 1 else shards[0]


def _chunks(full: Tensor, placement: Placement, count: int) -> Sequence[Tensor]:
    if count == 1:
        return [full]
    return full.chunk(count, placement.dim) if isinstance(placement, Shard) else [full] * count
