"""Tiles know the positions of their queries and keys; together they cover every visible pair once."""

import pytest

from megatron.core.attention.tiles import Visibility, plan_tiles

ZIGZAG = [(((0, 4), (12, 16)), ((0, 4), (12, 16))), (((0, 4), (12, 16)), ((4, 8), (8, 12))), (((4, 12),), ((0, 16),))]


def pairs_of(tile):
    """Yield (query position, key position) of the visible pairs in a tile."""
    for i in range(tile.num_queries):
        first = 0 if tile.left is None else max(0, i - tile.left)
        last = tile.num_keys - 1 if tile.right is None else min(tile.num_keys - 1, i + tile.right)
        for j in range(first, last + 1):
            yield tile.query_position + i, tile.key_position + j


@pytest.mark.parametrize("documents", [None, (0, 3, 9, 16)])
@pytest.mark.parametrize("window", [None, (3, 0), (0, 0), (6, 0), (2, 1), (-1, 2)])
@pytest.mark.parametrize("queries, keys", ZIGZAG)
def test_tiles_are_the_visible_pairs_at_their_positions(queries, keys, window, documents):
    causal = window is None or window[1] == 0
    visibility = Visibility(causal, window)
    results = [
        pair for tile in plan_tiles(queries, keys, visibility, 16, documents, merge=False) for pair in pairs_of(tile)
    ]
    before, after = visibility.limits
    bounds = documents or (0, 16)

    def sees(query, key):
        together = any(start <= query < stop and start <= key < stop for start, stop in zip(bounds, bounds[1:]))
        near = (before is None or query - key <= before) and (after is None or key - query <= after)
        return together and near

    expected = [
        (q, k) for span in queries for q in range(*span) for item in keys for k in range(*item) if sees(q, k)
    ]
    assert sorted(results) == sorted(expected)
