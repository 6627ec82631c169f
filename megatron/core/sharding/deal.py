"""Deal matrices to the ranks that share a parameter, so that each matrix is computed once.

    1. Ranks send the shards of a matrix to its owner: rows over FSDP ranks, then shards over tensor-parallel ranks.
    2. The owner computes the matrix. The matrices of a fused weight have one owner; experts are dealt in equal lots.
    3. The owner returns to each rank its shard, in the opposite order; ranks with copies all-gather the results.

A step is one all-to-all per axis. The owner receives the same bits as an all-gather, so that results do not depend on
who computes. The assignment is a pure function of costs: the most expensive unit first, to the least loaded rank."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from megatron.core.groups.collective_names import all_gather
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group, ProcessGroups
from megatron.core.sharding.full_tensor import is_split, join_shards, split_shards
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import Nested, ParameterSpec, Replicate, spec_or_replicated, stored_rectangle

ONE = SINGLE_PROCESS.world


class Axes(NamedTuple):
    """Groups whose ranks share the matrices of a parameter; a group of one rank for an axis that does not exist."""

    copies: Group
    """Ranks that hold the same elements: data parallelism without sharded state, or instances of the optimizer."""
    rows: Group
    """Ranks that hold other rows (FSDP)."""
    mesh: Group
    """Tensor-parallel ranks, for experts expert-tensor-parallel ranks."""

    @property
    def workers(self) -> list[tuple[int, int, int]]:
        """Coordinates of all ranks along the three axes."""
        return [*itertools.product(range(self.copies.size), range(self.rows.size), range(self.mesh.size))]


class Unit(NamedTuple):
    """Parameter, or some experts of it, with its owner."""

    number: int
    """Index of the parameter in the list of shards."""
    start: int
    """First element in this rank's shard along the mesh."""
    stop: int
    owner: tuple[int, int, int]
    """Coordinates in :class:`Axes`."""


def sharing_axes(shard: ParameterShard, copies: Group, groups: ProcessGroups) -> Axes:
    """Return the axes of one parameter. ``copies``: data-parallel ranks that hold the same elements."""
    rows = ONE if shard.rows_over is None else shard.rows_over
    return Axes(copies, rows, groups.etp if spec_or_replicated(shard.parameter).is_expert else groups.tp)


class Deal:
    """Assignment of parameters with equal ``axes`` to ranks, which pass the same parameters in the same order.
    Expert-parallel ranks share nothing: each deals its local experts. ``cost``: (logical full shape, spec) -> cost of a
    unit."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        axes: Axes,
        groups: ProcessGroups,
        cost: Callable[[Sequence[int], ParameterSpec], float],
    ) -> None:
        self.shards, self.axes = shards, axes
        self.specs = [spec_or_replicated(shard.parameter) for shard in shards]
        self._lengths = [stored_rectangle(spec, groups).lengths for spec in self.specs]
        spans = [span for index in range(len(shards)) for span in self._lots(index)]
        units = [Unit(*span, (0, 0, 0)) for span in spans]
        owners = assign([cost(self.shape(unit), self.specs[unit.number]) for unit in units], len(axes.workers))
        self.units = [unit._replace(owner=axes.workers[owner]) for unit, owner in zip(units, owners)]
        copies, rows, mesh = (group.rank for group in axes)
        self._computed = [unit for unit in self.units if unit.owner[0] == copies]
        self._by_column = [unit for unit in self._computed if unit.owner[1] == rows]
        self._owned = [unit for unit in self._by_column if unit.owner[2] == mesh]
        self.owned_specs = [self.specs[unit.number] for unit in self._owned]
        """Specs of the units that this rank computes, in order."""

    def _lots(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index, start, stop) of the units of a parameter: at most one per rank, of equal numbers of experts."""
        lengths = self._lengths[index]
        experts = lengths[0] if self.specs[index].is_expert else 1
        size, lot = math.prod(lengths) // experts, -(-experts // len(self.axes.workers))
        for first in range(0, experts, lot):
            yield index, first * size, min(first + lot, experts) * size

    def shape(self, unit: Unit) -> tuple[int, ...]:
        """Return the logical shape of a unit without padding."""
        spec = self.specs[unit.number]
        return self._unit_shape(unit, spec.shape if spec.part is None else spec.part.rectangle.lengths)

    def _unit_shape(self, unit: Unit, shape: Sequence[int]) -> tuple[int, ...]:
        lengths = self._lengths[unit.number]
        experts = (unit.stop - unit.start) // math.prod(lengths[1:])
        return (experts, *shape[1:]) if self.specs[unit.number].is_expert else tuple(shape)

    def collect(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the units that this rank owns, in their logical shapes, from ``tensors``, shaped as the shards (one
        per shard). Results may be views. Collective over all axes."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        return self._collect_mesh(self._collect_rows(flat), flat[0])

    def give_back(
        self, results: Sequence[Tensor], tensors: Sequence[Tensor], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return the elements of this rank's shards, shaped as ``tensors``, of the ``results`` of all owners: each for
        its units, in the order and shapes of :meth:`collect`, in ``dtype`` (None: that of ``tensors``). Collective over
        all axes; padding is zero in the result."""
        like = tensors[0].new_empty(0, dtype=dtype)
        return self._share_copies(self._return_rows(self._return_mesh(results, like), like), tensors, like)

    def _collect_rows(self, flat: list[Tensor]) -> list[Tensor]:
        """Send rows to the owners' columns; return the mesh shards of the units in this column, flat."""
        group = self.axes.rows
        if group.size == 1:
            return [flat[unit.number][unit.start : unit.stop] for unit in self._computed]
        outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
        for unit in self._computed:
            low, high = self._rows(unit, group.rank)
            first = self.shards[unit.number].start
            outgoing[unit.owner[1]].append(flat[unit.number][low - first : high - first])
        sizes = [[self._size(unit, rank) for unit in self._by_column] for rank in range(group.size)]
        return [torch.cat(pieces) for pieces in zip(*exchange(group, outgoing, sizes, flat[0]))]

    def _collect_mesh(self, local: list[Tensor], like: Tensor) -> list[Tensor]:
        """Send mesh shards to the owners; return the full tensors of this rank's units without padding."""
        group = self.axes.mesh
        outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
        for unit, shard in zip(self._by_column, local):
            if self._is_split(unit):
                outgoing[unit.owner[2]].append(shard)
        split = [unit for unit in self._owned if self._is_split(unit)]
        sizes = [[unit.stop - unit.start for unit in split] for _ in range(group.size)]
        received = dict(zip(split, zip(*exchange(group, outgoing, sizes, like))))
        local_units = dict(zip(self._by_column, local))
        full = []
        for unit in self._owned:
            pieces = [
                piece.view(self._unit_shape(unit, self._lengths[unit.number]))
                for piece in received.get(unit, (local_units[unit],))
            ]
            joined = join_shards(pieces, self._placement(unit)) if unit in received else pieces[0]
            full.append(joined[tuple(slice(length) for length in self.shape(unit))])
        return full

    def _return_mesh(self, results: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Send each mesh rank its shard of ``results``; return the local shards of this column's units, flat."""
        group = self.axes.mesh
        outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
        for unit, result in zip(self._owned, results):
            padded = self._padded(unit, result)
            shards = split_shards(padded, self._placement(unit), group.size) if self._is_split(unit) else None
            for rank, pieces in enumerate(outgoing):
                pieces.append((padded if shards is None else shards[rank]).reshape(-1))
        sent_by = [[unit for unit in self._by_column if unit.owner[2] == rank] for rank in range(group.size)]
        sizes = [[unit.stop - unit.start for unit in units] for units in sent_by]
        return _in_order(self._by_column, sent_by, exchange(group, outgoing, sizes, like))

    def _return_rows(self, shards: list[Tensor], like: Tensor) -> list[Tensor]:
        """Send each FSDP rank its rows of the mesh ``shards``; return the local rows of this copy's units, flat."""
        group = self.axes.rows
        if group.size == 1:
            return shards
        outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
        for unit, shard in zip(self._by_column, shards):
            for rank, pieces in enumerate(outgoing):
                low, high = self._rows(unit, rank)
                pieces.append(shard[low - unit.start : high - unit.start])
        sent_by = [[unit for unit in self._computed if unit.owner[1] == rank] for rank in range(group.size)]
        sizes = [[self._size(unit, group.rank) for unit in units] for units in sent_by]
        return _in_order(self._computed, sent_by, exchange(group, outgoing, sizes, like))

    def _share_copies(self, parts: list[Tensor], tensors: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """All-gather the ``parts`` of this copy's units over ranks with copies; return the shards of all parameters."""
        group = self.axes.copies
        dealt = [*zip(self._computed, parts)]
        if group.size > 1:
            computed_by = [[unit for unit in self.units if unit.owner[0] == rank] for rank in range(group.size)]
            sizes = [[self._size(unit, self.axes.rows.rank) for unit in units] for units in computed_by]
            length = max(map(sum, sizes))
            sent = torch.cat([*parts, like.new_zeros(length - sum(sizes[group.rank]))])
            received = sent.new_empty(group.size * length)
            all_gather(received, sent, group=group.handle)
            for units, lengths, block in zip(computed_by, sizes, received.split(length)):
                dealt += zip(units, block[: sum(lengths)].split(lengths)) if units else ()
        results: dict[int, Tensor] = {}
        for unit, part in dealt:
            shape = tensors[unit.number].shape
            if part.numel() == shape.numel():
                results[unit.number] = part.view(shape)
                continue
            if unit.number not in results:
                results[unit.number] = like.new_empty(shape)
            low, first = self._rows(unit, self.axes.rows.rank)[0], self.shards[unit.number].start
            results[unit.number].view(-1)[low - first : low - first + part.numel()] = part
        return [results[number] for number in range(len(tensors))]

    def _rows(self, unit: Unit, rank: int) -> tuple[int, int]:
        """Return the range of the unit's elements on one FSDP rank, counted as :attr:`Unit.start`."""
        if self.axes.rows.size == 1:
            return unit.start, unit.stop
        shape = self.shards[unit.number].parameter.shape
        chunk = -(-shape[0] // self.axes.rows.size) * (shape.numel() // shape[0])
        low = min(max(unit.start, rank * chunk), unit.stop)
        return low, max(low, min(unit.stop, (rank + 1) * chunk))

    def _size(self, unit: Unit, rank: int) -> int:
        low, high = self._rows(unit, rank)
        return high - low

    def _is_split(self, unit: Unit) -> bool:
        return self.axes.mesh.size > 1 and is_split(self._placement(unit))

    def _placement(self, unit: Unit) -> Placement | Nested:
        return self.specs[unit.number].mesh.get(self.axes.mesh.name, Replicate())

    def _padded(self, unit: Unit, full: Tensor) -> Tensor:
        stored = self._unit_shape(unit, self.specs[unit.number].stored)
        if stored == tuple(full.shape):
            return full
        padded = full.new_zeros(stored)
        padded[tuple(slice(length) for length in full.shape)] = full
        return padded


def assign(costs: Sequence[float], num_workers: int) -> list[int]:
    """Return a worker for each of ``costs``: the largest first, each to the least loaded worker."""
    loads, workers = [(0.0, worker) for worker in range(num_workers)], [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, workers[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], workers[index]))
    return workers


def exchange(group: Group, outgoing: list[list[Tensor]], sizes: list[list[int]], like: Tensor) -> list[list[Tensor]]:
    """Send the flat tensors ``outgoing[rank]`` to each rank; return the tensors of ``sizes[rank]`` elements received
    from each. One all-to-all, in which ranks without elements take part; ``like``: dtype and device."""
    if group.size == 1:
        return outgoing
    sent = torch.cat([like.new_empty(0), *itertools.chain(*outgoing)])
    totals = [sum(counts) for counts in sizes]
    received = like.new_empty(sum(totals))
    lengths = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    dist.all_to_all_single(received, sent, totals, lengths, group=group.handle)
    return [[*block.split(counts)] if counts else [] for block, counts in zip(received.split(totals), sizes)]


def _in_order(units: list[Unit], received: list[list[Unit]], tensors: list[list[Tensor]]) -> list[Tensor]:
    by_unit = dict(zip(itertools.chain(*received), itertools.chain(*tensors)))
    return [by_unit[unit] for unit in units]
