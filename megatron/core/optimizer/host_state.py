"""Optimizer state in host memory (--optimizer-cpu-offload), streamed through the device for each update.

    slot 0   load slice 0 | update | store slice 0          | load slice 3 | …
    slot 1                  load slice 1 | update | store slice 1 …

A *slice* is a list of parameter ranges whose extra master storage and moments fit in a slot, a fixed buffer on the
device. Loads and stores run on two side streams, so that both directions of the bus work at the same time; the update
rule runs with views of a slot in place of the state. Rules do not know where state lives, and results equal those
without offload to the bit: every element has the same inputs and operations. Weights and gradients stay on the device.
The host does not wait.

Slices are in the order of the forward pass. With overlap, updates run on a third stream (``WeightUpdates``): each
module of the next forward pass waits for its weights only. Larger buffers would hide no more than the same memory with
a smaller fraction: what the bus cannot move between the gradient norm and the end of the first forward pass is on the
device at its end, when activations are at their peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.distributed.weight_updates import WeightUpdates
from megatron.core.fusions.storage import Storage
from megatron.core.host_memory import HostMemory, SideStream
from megatron.core.sharding.buffer_layout import NUM_SLOTS, slot_bytes

if TYPE_CHECKING:
    from megatron.core.optimizer.update_rules import Conditions, Entry, UpdateRule

_ALIGNMENT = 256  # bytes: as of torch's allocator, so that kernels use wide accesses
_ALIGNED = 64  # elements: every tensor in a flat buffer starts on a 128-byte boundary in 16 bits
_UNIT = 64  # elements: ranges start at multiples, so that vectorized loops have the same tail as without slices


def select_offloaded(sizes: dict[str, int], fraction: float) -> frozenset[str]:
    """Return the names whose state is offloaded: the last of ``sizes``, which is in the order of the forward pass, as
    far as they hold at most ``fraction`` of all elements. State of the first weights is on the device, so that the
    next forward pass starts at once and the copies overlap with it."""
    left, chosen = fraction * sum(sizes.values()), []
    for name in reversed(sizes):
        if 0 < sizes[name] <= left:
            left -= sizes[name]
            chosen.append(name)
    return frozenset(chosen)


def flat_zeros(
    dtypes: Mapping[str, torch.dtype], weights: Mapping[str, Tensor], offloaded: Collection[str], memory: HostMemory
) -> dict[str, Tensor]:
    """Return zeros by name in the shapes of the named ``weights`` and the given dtypes. They are views into one new
    flat buffer per dtype, each aligned to 64 elements, and another one in host memory for the names ``offloaded``."""
    views: dict[str, Tensor] = {}
    kinds = {name: (dtype, name in offloaded) for name, dtype in dtypes.items()}
    for dtype, on_host in dict.fromkeys(kinds.values()):
        group = {name: weights[name] for name in dtypes if kinds[name] == (dtype, on_host)}
        sizes = [-(-weight.numel() // _ALIGNED) * _ALIGNED for weight in group.values()]
        size = sum(sizes)
        flat = memory.zeros(size, dtype) if on_host else torch.zeros(size, dtype=dtype, device=memory.device)
        for (name, weight), place in zip(group.items(), flat.split(sizes)):
            views[name] = place[: weight.numel()].view(weight.shape)
    return views


class Piece(NamedTuple):
    """Range of a parameter shard in a slice."""

    name: str
    start: int
    stop: int
    is_full: bool
    """Whether it covers the shard, so that tensors keep their shape; else they are flat."""
    places: tuple[int, ...]
    """Byte offset of each state tensor in the slot."""


class HostState:
    """Owner of the offloaded state: decides on slices, and provides device views for the time of an update.

    Args:
        rules: update rule of each part, with the names of its parameters in the order of ``sizes``.
        storages: storages of all shards by name; ``kept`` of an offloaded one is a host tensor.
        moments: moments by kind and name, host tensors if offloaded; read at every copy, so that they may be replaced.
        sizes: elements by name, in the order of the forward pass, equal on all ranks that share a parameter
            (``ParameterShard.max_elements``): rules that own matrices run collectives per slice, so that these ranks
            need the same slices.
        overlap: whether the first slices of the next update are loaded during forward and backward passes."""

    def __init__(
        self, rules: Sequence[tuple[UpdateRule, Sequence[str]]], storages: Mapping[str, Storage],
        moments: Mapping[str, Mapping[str, Tensor]], sizes: Mapping[str, int], names: frozenset[str], *,
        device: torch.device, updates: WeightUpdates, overlap: bool,
    ) -> None:  # fmt: skip
        self._storages, self._moments, self._sizes, self.names = storages, moments, sizes, names
        self._device, self._overlap = device, overlap
        self._kinds = {name: tuple(rule.moment_dtypes) for rule, names in rules for name in names}
        self._streamed = {name for name in names if self._state(name)}
        self._slices, slot_bytes = self._plan(rules)
        """Part and pieces of each slice, in the order of updates."""
        self._last_slices = {piece.name: index for index, (_, pieces) in enumerate(self._slices) for piece in pieces}
        self._updates = updates
        self._conditions: Conditions | None = None
        """Inputs of the updates in flight, kept alive for them."""
        count = NUM_SLOTS if names else 0
        self._slots = [torch.zeros(slot_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._users = [-1] * count
        """Index of the slice that was last loaded into each slot."""
        self._loads, self._stores = SideStream(device), SideStream(device)
        self._loads.copy((), [self._loads.record_current()])  # after the zeros of the slots
        self._loaded: dict[int, torch.cuda.Event | None] = {}
        """Events of loads that no update has used yet, by slice index."""
        self._stored: dict[int, torch.cuda.Event | None] = {}

    @property
    def device_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(slot.numel() for slot in self._slots)

    # ---- slices

    def _state(self, name: str) -> list[Tensor]:
        """Return the offloaded tensors of ``name``: extra master storage, then moments."""
        if name not in self.names:
            return []
        storage = self._storages[name].kept
        return ([] if storage is None else [storage]) + [self._moments[kind][name] for kind in self._kinds[name]]

    def _plan(self, rules: Sequence[tuple[UpdateRule, Sequence[str]]]) -> tuple[list[tuple[int, list[Piece]]], int]:
        """Return (number of the rule, slice) in the order of the forward pass, and the bytes of a slot."""
        streamed = [(rule, [name for name in names if name in self._streamed]) for rule, names in rules]
        widths = {
            name: sum(state.element_size() for state in self._state(name)) for _, names in streamed for name in names
        }
        least, total = _ALIGNMENT, 0
        for rule, names in streamed:
            for name in names:
                padding = _ALIGNMENT * len(self._state(name))
                size = self._sizes[name]
                unit = self._unit(name) if self._may_cut(rule, name) else size
                least = max(least, unit * widths[name] + padding)  # an empty slot has room for a unit
                total += size * widths[name] + padding
        capacity = slot_bytes(total, least)
        slices = [
            (part, pieces)
            for part, (rule, names) in enumerate(streamed)
            for pieces in self._cut(rule, names, widths, capacity)
        ]
        position = {name: index for index, name in enumerate(self._sizes)}
        return sorted(slices, key=lambda item: position[item[1][0].name]), capacity

    def _unit(self, name: str) -> int:
        return math.lcm(_UNIT, self._storages[name].block)

    def _may_cut(self, rule: UpdateRule, name: str) -> bool:
        return rule.owns == "elements" and self._storages[name].weight.is_contiguous()

    def _cut(
        self, rule: UpdateRule, names: Sequence[str], widths: Mapping[str, int], capacity: int
    ) -> list[list[Piece]]:
        """Return consecutive slices of at most ``capacity`` bytes. ``widths``: bytes of state per element."""
        slices: list[list[Piece]] = [[]]
        used = 0
        for name in names:
            local, tensors, cuts = self._storages[name].weight.numel(), self._state(name), self._may_cut(rule, name)
            # a matrix takes the room of the largest shard, also if it has fewer rows here or none: a slice that ends
            # elsewhere than on the other ranks would be another collective
            size, unit = (local, self._unit(name)) if cuts else (self._sizes[name], self._sizes[name])
            start = 0
            while start < size:
                room = capacity - used - _ALIGNMENT * len(tensors)
                stop = min(size, start + max(room, 0) // (widths[name] * unit) * unit)
                if stop == start:
                    slices.append([])
                    used = 0
                    continue
                places = []
                for tensor in tensors:
                    places.append(used)
                    used += -(-(stop - start) * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
                slices[-1].append(Piece(name, start, min(stop, local), stop - start == size, tuple(places)))
                start = stop
        return [pieces for pieces in slices if pieces]

    def _pairs(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in self._slices[index][1]:
            for tensor, view in zip(self._state(piece.name), self._views(index, piece)):
                yield view.view(-1), tensor.view(-1)[piece.start : piece.stop]

    def _views(self, index: int, piece: Piece) -> list[Tensor]:
        slot, views = self._slots[index % len(self._slots)], []
        for tensor, place in zip(self._state(piece.name), piece.places):
            num_bytes = (piece.stop - piece.start) * tensor.element_size()
            view = slot[place : place + num_bytes].view(tensor.dtype)
            views.append(view.view(tensor.shape) if piece.is_full else view)
        return views

    # ---- streaming

    def update(
        self,
        parts: Sequence[tuple[UpdateRule, Sequence[Entry]]],
        conditions: Conditions,
        progress: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        """Run the update rule of each part on its parameters that have a gradient: first those with state on the
        device, then slice by slice. ``progress`` is called with the parameters whose last update was queued. The
        state on the host is valid after :meth:`settle`."""
        self._conditions = conditions
        begin = self._loads.record_current()
        streamed: dict[str, Entry] = {}
        for rule, entries in parts:
            streamed |= {entry.name: entry for entry in entries if entry.name in self._streamed}
            local = [entry for entry in entries if entry.name not in self._streamed]
            # on the current stream: slices need not wait, and forward starts with these weights
            rule.update(local, conditions)
            progress([entry.shard.parameter for entry in local])
        for index, (part, pieces) in enumerate(self._slices):
            # load ahead before the update is queued, so that the bus never idles
            for ahead in range(index, min(index + len(self._slots), len(self._slices))):
                self._load(ahead)
            pieces = [piece for piece in pieces if piece.name in streamed]
            entries = [self._on_device(index, piece, streamed[piece.name]) for piece in pieces]
            last = [piece.name for piece in pieces if self._last_slices[piece.name] == index]
            weights = [streamed[name].shard.parameter for name in last]
            update = partial(parts[part][0].update, entries, conditions)
            updated = self._updates.run(update, [begin, self._loaded.pop(index)], weights)
            self._stored[index] = self._stores.copy(((host, view) for view, host in self._pairs(index)), [updated])
            progress(weights)
        for index in range(len(self._slots) if self._overlap else 0):
            self._load(index)

    def _load(self, index: int) -> None:
        if index in self._loaded or index >= len(self._slices):
            return
        # the slot is free once its last slice is stored; the slice itself may have been stored a moment ago
        slot = index % len(self._slots)
        after = [self._stored.get(other) for other in (self._users[slot], index)]
        self._users[slot] = index
        self._loaded[index] = self._loads.copy(self._pairs(index), after)

    def _on_device(self, index: int, piece: Piece, entry: Entry) -> Entry:
        views = self._views(index, piece)
        memory = None if entry.storage.kept is None else views.pop(0)
        part = None if piece.is_full else slice(piece.start, piece.stop)
        gradient = entry.gradient if part is None else entry.gradient.reshape(-1)[part]
        return replace(
            entry, storage=entry.storage.with_kept(memory, part), gradient=gradient, moments=tuple(views)
        )  # fmt: skip

    # ---- access between updates

    def settle(self) -> None:
        """Let the host wait until the state on the host is complete, and discard what was loaded ahead. Call it before
        the host reads or changes the state. Weights are then complete, too: stores follow updates."""
        for stream in (self._stores, self._loads):
            stream.synchronize()
        self._loaded.clear()

    @contextmanager
    def opened(self, name: str) -> Iterator[Storage]:
        """Context with the storage of ``name`` on the device; written back at the end. The host waits."""
        storage = self._storages[name]
        if name not in self.names or storage.kept is None:
            self._updates.join()
            yield storage
            return
        self.settle()
        memory = storage.kept.to(self._device, copy=True)
        yield storage.with_kept(memory)
        storage.kept.copy_(memory)

    def read(self, name: str, *, on_host: bool = False) -> Tensor:
        """Return the master weight of ``name``, or with ``on_host`` where its state is (live if possible)."""
        storage = self._storages[name]
        if on_host and storage.is_live:
            self._updates.join()
            return storage.read()
        with self.opened(name) as opened:
            value = opened.read()
        return value.cpu() if on_host and name in self.names else value
