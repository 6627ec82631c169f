"""Best-fit decreasing: sequences packed into rows of equal capacity, none of them split.

Sequences, the longest first, go to the fullest row in which they fit. The number of rows, and the lengths that share a
row, depend on the lengths only; each epoch puts other sequences of equal length into the places of the plan."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """Row i holds the sequences ``order[bounds[i] : bounds[i + 1]]``."""

    order: np.ndarray
    bounds: np.ndarray


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of indices into ``lengths``, which descend and are at most ``capacity``; O(n log capacity)."""
    rows: list[list[int]] = []
    free: dict[int, list[int]] = {}  # tokens left -> rows; the next sequence goes to the last one
    sizes: list[int] = []  # the keys of ``free``, ascending
    for index, length in enumerate(lengths):
        place = bisect_left(sizes, length)
        if place == len(sizes):
            row, left = len(rows), capacity
            rows.append([])
        else:
            left = sizes[place]
            row = free[left].pop()
            if not free[left]:
                del free[left], sizes[place]
        rows[row].append(index)
        if left := left - length:
            if left not in free:
                free[left] = []
                insort(sizes, left)
            free[left].append(row)
    return rows


def pack_epochs(lengths: np.ndarray, capacity: int, seed: int, num_epochs: int, pack: bool = True) -> Rows:
    """Return the rows of ``num_epochs`` passes over sequences of ``lengths`` (int [n], 1 to ``capacity``); the order is
    a function of (lengths, capacity, seed, epoch). Without ``pack`` a row holds one sequence."""
    descending = np.sort(lengths)[::-1].tolist()
    rows = best_fit_decreasing(descending, capacity) if pack else [[index] for index in range(len(lengths))]
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    places = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    starts = np.cumsum(sizes) - sizes
    order, bounds = [], [np.zeros(1, dtype=np.int64)]
    for epoch in range(num_epochs):
        generator = np.random.Generator(np.random.PCG64([seed, epoch]))
        shuffled = generator.permutation(len(lengths))
        by_length = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
        rank = generator.permutation(len(rows))
        indices = np.repeat(starts[rank], sizes[rank]) + _ranges(sizes[rank])
        order.append(by_length[places[indices]])
        bounds.append(np.cumsum(sizes[rank]) + epoch * len(lengths))
    return Rows(np.concatenate(order), np.concatenate(bounds))


def _ranges(sizes: np.ndarray) -> np.ndarray:
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
