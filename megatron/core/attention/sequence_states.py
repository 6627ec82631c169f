"""States of sequences while generating: what a mixer keeps per sequence, besides tensors per token in pages.

A state has a *slot* per running sequence. A *snapshot* is a slot with the state after a full page of tokens, so that
another sequence with the same beginning continues from it. Slot 0 is zero, the state before the first token; slot 1 is
written by padding rows and is never read."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

ZERO, UNUSED, NUM_RESERVED = 0, 1, 2


@dataclass(frozen=True)
class CacheSpec:
    """What a mixer keeps while generating, by the names that it passes to the layout."""

    per_token: tuple[str, ...] = ()
    """Tensors [1, ...] of each token, in pages: keys, values, latents."""
    per_sequence: tuple[str, ...] = ()
    """Tensors [...] of each sequence, in slots: recurrent states, the last inputs of a convolution."""


class StateSlots(NamedTuple):
    """Slots that the chunk of a sequence uses."""

    before: int = ZERO
    """Slot of the state before its first token."""
    after: int = UNUSED
    """Slot of the state after its last token."""
    snapshot: int = UNUSED
    """Slot of a copy of the state after its last token."""


class StateCache:
    """States [slots, ...] by layer and name, allocated when a layer first stores."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._tensors: dict[tuple[int, str], Tensor] = {}

    def tensor(self, layer: int, name: str, like: Tensor) -> Tensor:
        """Return the states of ``layer`` in the shape and dtype of ``like`` [sequences, ...]."""
        if (states := self._tensors.get((layer, name))) is None:
            states = self._tensors[layer, name] = like.new_zeros((self.num_slots, *like.shape[1:]))
        return states

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers that have stored."""
        return sum(states[0].numel() * states.element_size() for states in self._tensors.values())


class SlotPool:
    """Slots of running sequences and of snapshots (by page key); the oldest unused one is replaced."""

    def __init__(self, num_sequences: int, num_snapshots: int) -> None:
        first = NUM_RESERVED + num_sequences
        self._free = list(range(first - 1, NUM_RESERVED - 1, -1))
        self._free_snapshots = list(range(first + num_snapshots - 1, first - 1, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._written: set[int] = set()
        """Snapshots that the step in preparation writes: no other sequence of the step may write them too."""
        self.num_slots = first + num_snapshots

    def begin_step(self) -> None:
        """Start to prepare a step."""
        self._written.clear()

    def allocate(self) -> int:
        """Return the slot of a new sequence; there is one per running sequence."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Return the slot of a sequence."""
        self._free.append(slot)

    def find(self, key: bytes) -> int | None:
        """Return the snapshot of ``key``, which counts as used now."""
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
        return self._snapshots.get(key)

    def snapshot(self, key: bytes) -> int:
        """Return the slot to which the state of ``key`` must be copied next; :data:`UNUSED` if one exists."""
        if self.find(key) is not None or not (self._free_snapshots or self._snapshots):
            return UNUSED
        slot = self._free_snapshots.pop() if self._free_snapshots else self._snapshots.popitem(last=False)[1]
        self._snapshots[key] = slot
        self._written.add(slot)
        return slot

    def replace(self, key: bytes) -> None:
        """Forget the snapshot of ``key``, unless the step in preparation writes it."""
        if self._snapshots.get(key) not in self._written:
            self.withdraw([key])

    def withdraw(self, keys: list[bytes] | None = None) -> None:
        """Forget the snapshots of ``keys``, or all."""
        for key in list(self._snapshots) if keys is None else keys:
            if (slot := self._snapshots.pop(key, None)) is not None:
                self._free_snapshots.append(slot)
