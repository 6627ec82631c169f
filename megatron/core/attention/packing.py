"""Tiles of many documents as few calls of a variable-length kernel.

A kernel launch per document would cost more than the documents' attention. Tiles with the same band go into one group
as long as no query and no key is in it twice, so that results can be written back by index, without atomic additions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.attention.tiles import Tile

Group = tuple[Tile, ...]


_TILES_PER_DOCUMENT = 16
"""Two stretches of queries times two of keys times three or four parts. Tiles of other documents share no token, and
those of one document come one after the other."""


class Segments(NamedTuple):
    """A group on a device: where its tokens stand in tensors flattened [s, b] -> [s * b], and their boundaries."""

    query_index: Tensor
    key_index: Tensor
    query_bounds: Tensor
    """int32 [tiles + 1], cumulative lengths."""
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    window: tuple[int, int]


def kernel_window(tile: Tile) -> tuple[int, int]:
    """The band as flash kernels count it, from the lower right corner; -1 is no limit."""
    shift = tile.num_keys - tile.num_queries
    return -1 if tile.left is None else tile.left + shift, -1 if tile.right is None else tile.right - shift


def _meet(one: Tile, other: Tile) -> bool:
    """Whether two tiles share a query or a key."""
    queries = one.query < other.query + other.num_queries and other.query < one.query + one.num_queries
    keys = one.key < other.key + other.num_keys and other.key < one.key + one.num_keys
    return one.row == other.row and (queries or keys)


@functools.lru_cache(maxsize=256)
def group_tiles(tiles: tuple[Tile, ...]) -> tuple[Group, ...]:
    """Tiles of single rows by band, no token twice among a group's queries or keys."""
    groups: list[tuple[tuple[int, int], list[Tile]]] = []
    for tile in tiles:
        window = kernel_window(tile)
        for other, members in groups:
            if other == window and not any(_meet(tile, each) for each in members[-_TILES_PER_DOCUMENT:]):
                members.append(tile)
                break
        else:
            groups.append((window, [tile]))
    return tuple(tuple(members) for _, members in groups)


@functools.lru_cache(maxsize=64)
def segments(group: Group, batch: int, device: torch.device) -> Segments:
    """``group`` for tensors [s, batch, ...] on ``device``; kept, since all layers of a model ask for the same."""
    queries = [(tile.query, tile.num_queries, tile.row or 0) for tile in group]
    keys = [(tile.key, tile.num_keys, tile.row or 0) for tile in group]
    return Segments(
        _token_index(queries, batch).to(device, non_blocking=True),
        _token_index(keys, batch).to(device, non_blocking=True),
        _bounds(queries).to(device, non_blocking=True),
        _bounds(keys).to(device, non_blocking=True),
        max(length for _, length, _ in queries),
        max(length for _, length, _ in keys),
        kernel_window(group[0]),
    )


def _token_index(stretches: Iterable[tuple[int, int, int]], batch: int) -> Tensor:
    return torch.cat([torch.arange(start, start + length) * batch + row for start, length, row in stretches])


def _bounds(stretches: list[tuple[int, int, int]]) -> Tensor:
    lengths = torch.tensor([0] + [length for _, length, _ in stretches])
    return lengths.cumsum(0).to(torch.int32)
