"""Zig-zag parts of the ranks, and tiles: they cover every visible pair exactly once."""

import itertools

import pytest
import torch

from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.tiles import Visibility, plan_tiles


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_hold_an_early_and_a_late_chunk_and_the_inverse_puts_them_back(size):
    x = torch.arange(2 * 24).view(2, 24)
    parts = [zigzag.local_part(x, rank, size) for rank in range(size)]
    for rank, part in enumerate(parts):
        assert torch.equal(part[0], zigzag.positions(24, rank, size))
        chunk = 24 // (2 * size)
        assert part[0, 0] == rank * chunk and part[0, -1] == 24 - rank * chunk - 1
    assert torch.equal(zigzag.merge_parts(parts), x)
    assert torch.equal(zigzag.merge_parts([part.t() for part in parts], dim=0), x.t())


def test_lengths_without_equal_chunks_name_the_nearest():
    with pytest.raises(ValueError, match="nearest length: 24"):
        zigzag.spans(30, 0, 4)


def visible_pairs(batch, length, visibility, documents):
    """[b, s, s] from the definition."""
    left, right = visibility.limits
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    visible = torch.ones(length, length, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    visible = visible.expand(batch, length, length).clone()
    if documents is not None:
        document = torch.bucketize(torch.arange(batch * length), torch.tensor(documents[1:]), right=True)
        document = document.view(batch, length)
        visible &= document[:, :, None] == document[:, None, :]
    return visible


VISIBILITIES = [
    Visibility(True), Visibility(False), Visibility(True, (5, 0)), Visibility(True, (0, 0)), Visibility(True, (100, 0)),
    Visibility(False, (3, 2)), Visibility(False, (-1, 4)), Visibility(False, (6, -1)), Visibility(True, (9, 3)),
]  # fmt: skip
DOCUMENTS = [None, (0, 7, 8, 24, 24, 48), (0, 24, 27, 30, 41, 48), tuple(range(49))]


def covered_pairs(tiles, batch, queries, keys, length):
    count = torch.zeros(batch, length, length, dtype=torch.int64)
    for tile in tiles:
        i, j = torch.arange(tile.num_queries)[:, None], torch.arange(tile.num_keys)[None, :]
        band = torch.ones(tile.num_queries, tile.num_keys, dtype=torch.bool)
        assert tile.left is None or 0 <= tile.left < tile.num_queries - 1
        assert tile.right is None or 0 <= tile.right < tile.num_keys - 1
        if tile.left is not None:
            band &= j - i >= -tile.left
        if tile.right is not None:
            band &= j - i <= tile.right
        assert band.any(1).all(), "every query of a tile sees a key"
        if tile.left is None:
            assert tile.is_full or tile.is_causal_square or tile.right, "a causal tile is a square"
        rows = range(batch) if tile.row is None else [tile.row]
        at = queries[tile.query : tile.query + tile.num_queries][:, None], keys[tile.key : tile.key + tile.num_keys]
        for row in rows:
            count[row][at] += band.long()
    return count


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiles_of_all_blocks_cover_every_visible_pair_once(size, merge):
    length, batch = 24, 2
    everything = torch.arange(length), ((0, length),)
    blocks = [(zigzag.positions(length, rank, size), zigzag.spans(length, rank, size)) for rank in range(size)]
    for visibility, documents in itertools.product(VISIBILITIES, DOCUMENTS):
        expected = visible_pairs(batch, length, visibility, documents)
        for keys in ([everything], blocks):
            total = torch.zeros(batch, length, length, dtype=torch.int64)
            for (queries, query_spans), (key_positions, key_spans) in itertools.product(blocks, keys):
                tiles = plan_tiles(query_spans, key_spans, visibility, length, documents, merge)
                total += covered_pairs(tiles, batch, queries, key_positions, length)
            assert torch.equal(total, expected.long()), (visibility, documents)


@pytest.mark.parametrize("rank", range(4))
def test_a_causal_ring_takes_one_tile_per_block_of_equal_work(rank):
    spans = [zigzag.spans(64, other, 4) for other in range(4)]
    tiles = [plan_tiles(spans[rank], keys, Visibility(), 64) for keys in spans]
    assert [len(item) for item in tiles] == [1] * 4
    work = [tile.num_queries * tile.num_keys for (tile,) in tiles]
    assert work == [256 if other == rank else 128 for other in range(4)]  # half of the square is hidden


def test_without_merging_positions_of_a_tile_are_consecutive():
    for rank, other in itertools.product(range(4), repeat=2):
        queries, keys = (zigzag.positions(64, x, 4) for x in (rank, other))
        spans = zigzag.spans(64, rank, 4), zigzag.spans(64, other, 4)
        for tile in plan_tiles(*spans, Visibility(False), 64, None, False):
            assert queries[tile.query + tile.num_queries - 1] == tile.query_position + tile.num_queries - 1
            assert keys[tile.key + tile.num_keys - 1] == tile.key_position + tile.num_keys - 1
            assert queries[tile.query] == tile.query_position and keys[tile.key] == tile.key_position
