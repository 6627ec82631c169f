"""Tiles: blockwise attention as a list of rectangles of query-key pairs, each with a band of visible pairs.

A rank's queries and a block of keys are a few ranges of consecutive global positions. In the rectangle of two ranges,
causality, sliding windows and document boundaries reduce to one condition: query i sees key j (local indices) if
-left <= j - i <= right. Every mask is therefore a list of tiles without fully hidden pairs, and no mask larger than a
tile is built.

Tiles have shapes that fused kernels support. A rectangle cut by the causal diagonal is split into a full tile and a
square on the diagonal. Tiles with a left limit never have more queries than keys: flash kernels replace a missing right
limit by the number of keys, which is then too small (the first queries would miss the last keys)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.attention.context_parallel.zigzag import Spans

Bounds = tuple[int, ...]
"""Cumulative document lengths over the flattened [b * s] batch, from 0 to b * s."""


class Tile(NamedTuple):
    """Queries [query, query + num_queries) and keys [key, key + num_keys), as indices in local tensors, with a band."""

    row: int | None
    """Row of the batch; None: all rows."""
    query: int
    num_queries: int
    key: int
    num_keys: int
    left: int | None
    """Visible where j - i >= -left; None: no limit."""
    right: int | None
    """Visible where j - i <= right; None: no limit."""
    query_position: int
    """Global position of the first query."""
    key_position: int
    """Global position of the first key."""

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def is_causal_square(self) -> bool:
        return self.left is None and self.right == 0 and self.num_queries == self.num_keys


class Visibility(NamedTuple):
    """Visible pairs of positions within one document: causality and window."""

    causal: bool = True
    window: tuple[int, int] | None = None
    """Visible keys to the left and right; -1 is unlimited."""

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Numbers of visible keys before and after a query's position; None is unlimited."""
        left, right = self.window or (-1, -1)
        return None if left < 0 else left, 0 if self.causal else None if right < 0 else right


def full_tile(num_queries: int, num_keys: int, visibility: Visibility) -> Tile:
    """Return the tile of all queries and all keys of one sequence, all rows; the last query has the last key's
    position. Limits that hide nothing become None. Without any the tile is full from position 0."""
    if visibility == Visibility(False):  # positions are unrelated: queries and keys may belong to two sequences
        return Tile(None, 0, num_queries, 0, num_keys, None, None, 0, 0)
    (before, after), shift = visibility.limits, num_keys - num_queries
    left = None if before is None or before >= num_keys - 1 else before - shift
    right = None if after is None or after >= num_queries - 1 else after + shift
    return Tile(None, 0, num_queries, 0, num_keys, left, right, shift, 0)


@functools.lru_cache(maxsize=1024)
def plan_tiles(
    query_spans: Spans,
    key_spans: Spans,
    visibility: Visibility,
    length: int,
    documents: Bounds | None = None,
    merge: bool = True,
    keys: tuple[Bounds, int] | None = None,
) -> tuple[Tile, ...]:
    """Return tiles of all visible pairs of the queries at ``query_spans`` and the keys at ``key_spans``. Cached.

    Args:
        length: tokens per full query sequence, used with ``documents``.
        documents: document bounds over the flattened batch; tiles are then per row, else for all rows.
        merge: join tiles across ranges if the mask depends only on the order of positions (fewer, larger kernel calls).
            The positions of a merged tile are valid for its first query and key only.
        keys: document bounds and sequence length of keys if they differ from the queries'."""
    order_matters_only = documents is None and visibility in (Visibility(True, None), Visibility(False, None))
    if merge and order_matters_only:
        tile = _single_tile(query_spans, key_spans, visibility.causal)
        if tile is not None:
            return (tile,)
    if documents is None:
        return tuple(_row_tiles(None, query_spans, key_spans, visibility))
    tiles: list[Tile] = []
    for of_queries, of_keys in zip(_documents(documents, length), _documents(*(keys or (documents, length)))):
        if all(stop > start for _, start, stop in (of_queries, of_keys)):
            tiles += _row_tiles(of_queries[0], query_spans, key_spans, visibility, (of_queries[1:], of_keys[1:]))
    return tuple(tiles)


def _single_tile(queries: Spans, keys: Spans, causal: bool) -> Tile | None:
    """Return the one tile that has the same visible pairs as two zig-zag parts without window and documents: all pairs,
    the causal square of equal parts, the late queries with all keys, or all queries with the early keys. None in other
    cases, or if causal parts overlap otherwise. Its positions are valid for its first query and key only."""
    num_queries, num_keys = (sum(stop - start for start, stop in spans) for spans in (queries, keys))
    first = queries[0][0], keys[0][0]
    if not causal or queries[0][0] >= keys[-1][1]:
        return Tile(None, 0, num_queries, 0, num_keys, None, None, *first)
    if queries == keys:
        return Tile(None, 0, num_queries, 0, num_keys, None, 0, *first)
    if len(queries) == 2 and queries[0][1] <= keys[0][0] and queries[1][0] >= keys[-1][1]:
        early, late = queries  # the early queries see no key, the late queries see all keys
        skipped = early[1] - early[0]
        return Tile(None, skipped, late[1] - late[0], 0, num_keys, None, None, late[0], first[1])
    if len(keys) == 2 and queries[0][0] >= keys[0][1] and queries[-1][1] <= keys[1][0]:
        early = keys[0]  # all queries see the early keys and no late key
        return Tile(None, 0, num_queries, 0, early[1] - early[0], None, None, *first)
    return None


def _documents(bounds: Bounds, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start, stop) of each document, with positions [start, stop) in the row."""
    for start, stop in zip(bounds, bounds[1:]):
        row = start // length
        yield row, start - row * length, stop - row * length


def _row_tiles(
    row: int | None,
    queries: Spans,
    keys: Spans,
    visibility: Visibility,
    document: tuple[tuple[int, int], tuple[int, int]] | tuple[None, None] = (None, None),
) -> Iterator[Tile]:
    """Yield the visible tiles of one row: every span of queries with every span of keys, both clipped to ``document``.
    Tile offsets count from the start of the concatenated spans."""
    query_offset = 0
    for query_start, query_stop in queries:
        key_offset = 0
        for key_start, key_stop in keys:
            first_query, last_query = _clipped(query_start, query_stop, document[0])
            first_key, last_key = _clipped(key_start, key_stop, document[1])
            if first_query < last_query and first_key < last_key:
                tile = Tile(
                    row,
                    query_offset + first_query - query_start,
                    last_query - first_query,
                    key_offset + first_key - key_start,
                    last_key - first_key,
                    None,
                    None,
                    first_query,
                    first_key,
                )
                yield from _visible_part(tile, *visibility.limits)
            key_offset += key_stop - key_start
        query_offset += query_stop - query_start


def _clipped(start: int, stop: int, document: tuple[int, int] | None) -> tuple[int, int]:
    return (start, stop) if document is None else (max(start, document[0]), min(stop, document[1]))


def _visible_part(tile: Tile, before: int | None, after: int | None) -> Iterator[Tile]:
    """Yield tiles of the visible pairs of ``tile`` (at most ``before`` and ``after`` positions from the query; None: no
    limit), with the band in local indices: without queries and keys that have no visible pair, cut so that a tile with
    a left limit has no more queries than keys, and causal ones split at the diagonal."""
    distance = tile.query_position - tile.key_position
    low = -tile.num_queries if before is None else distance - before  # visible: low <= j - i <= high
    high = tile.num_keys if after is None else distance + after
    skipped_queries, skipped_keys = max(0, -high), max(0, low)
    num_queries = min(tile.num_queries, tile.num_keys - low) - skipped_queries
    num_keys = min(tile.num_keys, tile.num_queries + high) - skipped_keys
    if num_queries <= 0 or num_keys <= 0:
        return
    left, right = skipped_keys - low - skipped_queries, high + skipped_queries - skipped_keys
    visible = tile._replace(
        query=tile.query + skipped_queries,
        num_queries=num_queries,
        key=tile.key + skipped_keys,
        num_keys=num_keys,
        query_position=tile.query_position + skipped_queries,
        key_position=tile.key_position + skipped_keys,
        left=None if left >= num_queries - 1 else left,
        right=None if right >= num_keys - 1 else right,
    )
    if visible.left is None or num_queries <= num_keys:
        yield from _split_at_the_diagonal(visible)
        return
    for first in range(0, num_queries, num_keys):
        yield from _visible_part(_query_rows(visible, first, min(num_keys, num_queries - first)), before, after)


def _query_rows(tile: Tile, first: int, count: int) -> Tile:
    """Return ``count`` queries of a tile from index ``first``, without a band."""
    return tile._replace(
        query=tile.query + first, num_queries=count, query_position=tile.query_position + first, left=None, right=None
    )


def _split_at_the_diagonal(tile: Tile) -> Iterator[Tile]:
    """Split a causal trapezoid into up to three tiles: the keys that all queries see, the square on the diagonal, and
    the queries that see all keys of that square. Other bands are yielded unchanged."""
    right = tile.right
    if tile.left is not None or right is None:
        yield tile
        return
    if right:
        yield tile._replace(num_keys=right, right=None)
    side = tile.num_keys - right
    below = tile._replace(key=tile.key + right, key_position=tile.key_position + right, num_keys=side)
    yield below._replace(num_queries=side, right=None if side == 1 else 0)
    if side < tile.num_queries:
        yield below._replace(
            query=tile.query + side,
            query_position=tile.query_position + side,
            num_queries=tile.num_queries - side,
            right=None,
        )
