"""Group the tiles of many documents into few calls of a variable-length kernel.

One kernel launch per document would cost more than the attention itself. Tiles with the same band form a group if no
query and no key occurs twice in it, so that results can be written back by index, without atomic additions."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.attention.tiles import Tile
from megatron.core.host_memory import copied

Group = tuple[Tile, ...]


_TILES_PER_DOCUMENT = 16
"""Upper bound: two query ranges x two key ranges x up to four tiles. Only tiles of the same document can share tokens,
and they are consecutive, so that :func:`group_tiles` compares with this many tiles only."""


class Segments(NamedTuple):
    """Device tensors of one group: token indices into tensors flattened from [s, b] to [s * b], and segment bounds."""

    query_index: Tensor
    key_index: Tensor
    query_bounds: Tensor
    """Cumulative segment lengths, int32 [tiles + 1]."""
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    window: tuple[int, int]


def kernel_window(tile: Tile) -> tuple[int, int]:
    """Return the tile's band (left, right) relative to the lower right corner, for flash kernels; -1 is no limit."""
    shift = tile.num_keys - tile.num_queries
    return -1 if tile.left is None else tile.left + shift, -1 if tile.right is None else tile.right - shift


def _meet(one: Tile, other: Tile) -> bool:
    """Return whether two tiles share a query or a key."""
    queries = one.query < other.query + other.num_queries and other.query < one.query + one.num_queries
    keys = one.key < other.key + other.num_keys and other.key < one.key + one.num_keys
    return one.row == other.row and (queries or keys)


@functools.lru_cache(maxsize=256)
def group_tiles(tiles: tuple[Tile, ...]) -> tuple[Group, ...]:
    """Group tiles of single rows for variable-length kernel calls: all tiles of a group have one band
    (:func:`kernel_window`), and no query or key occurs in two of them. Tiles of one document must be consecutive. Every
    tile is in one group. Cached by ``tiles``."""
    groups: list[tuple[tuple[int, int], list[Tile]]] = []
    for tile in tiles:
        window = kernel_window(tile)
        for other, members in groups:
            if other == window and not any(_meet(tile, member) for member in members[-_TILES_PER_DOCUMENT:]):
                members.append(tile)
                break
        else:
            groups.append((window, [tile]))
    return tuple(tuple(members) for _, members in groups)


@functools.lru_cache(maxsize=64)
def segments(group: Group, batch: int, device: torch.device) -> Segments:
    """Return the token indices, cumulative bounds, longest segments and window of ``group`` for tensors [s, batch, ...]
    flattened to [s * batch], on ``device``, without a wait. Cached for all layers: do not write to the tensors."""
    queries = [(tile.query, tile.num_queries, tile.row or 0) for tile in group]
    keys = [(tile.key, tile.num_keys, tile.row or 0) for tile in group]
    return Segments(
        copied(_token_index(queries, batch), device),
        copied(_token_index(keys, batch), device),
        copied(_bounds(queries), device),
        copied(_bounds(keys), device),
        max(length for _, length, _ in queries),
        max(length for _, length, _ in keys),
        kernel_window(group[0]),
    )


def _token_index(stretches: Iterable[tuple[int, int, int]], batch: int) -> Tensor:
    return torch.cat([torch.arange(start, start + length) * batch + row for start, length, row in stretches])


def _bounds(stretches: list[tuple[int, int, int]]) -> Tensor:
    lengths = torch.tensor([0] + [length for _, length, _ in stretches])
    return lengths.cumsum(0).to(torch.int32)
