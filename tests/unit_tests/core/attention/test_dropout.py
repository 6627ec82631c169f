"""Dropout of attention weights does not depend on which samples share a row."""

import pytest
import torch

from megatron.core.attention.dropout import WeightDropout
from megatron.core.attention.tiles import Visibility, full_tile, plan_tiles
from megatron.core.random.philox import DropoutStream

BOUNDS, SAMPLES = (0, 5, 16, 24), (7, 2**33 + 1, -1)
LENGTH, HEADS = 24, 3


def dropout(samples, documents=None):
    return WeightDropout(DropoutStream(11), 0.4, ("layer", 1), 2, torch.tensor(samples), documents)


def by_sample(pair):
    """Mask [a, s, s] of all pairs of one sample, from rows of one sample each."""
    expected = torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool)
    for start, stop, sample in zip(BOUNDS, BOUNDS[1:], SAMPLES):
        tile = full_tile(stop - start, stop - start, Visibility(False))
        expected[:, start:stop, start:stop] = dropout([sample]).keep(tile, HEADS)[0]
    return expected[pair]


@pytest.mark.parametrize("spans", [((0, LENGTH),), ((4, 10), (18, 24)), ((10, 18),)])
@pytest.mark.parametrize("visibility", [Visibility(), Visibility(False), Visibility(True, (3, 0))])
def test_packed_samples_drop_the_weights_of_separate_rows(spans, visibility):
    packed = dropout([0] * 8, (BOUNDS, SAMPLES))
    local = torch.cat([torch.arange(*span) for span in spans])
    tiles = plan_tiles(spans, ((0, LENGTH),), visibility, LENGTH, BOUNDS, merge=False)
    assert tiles
    for tile in tiles:
        queries = local[tile.query : tile.query + tile.num_queries]
        keys = torch.arange(tile.key, tile.key + tile.num_keys)
        mask = packed.keep(tile, HEADS)
        assert torch.equal(mask[0], by_sample((slice(None), queries[:, None], keys))) and not mask.all()


def test_a_tile_of_all_samples_drops_only_within_them():
    mask = dropout([0] * 8, (BOUNDS, SAMPLES)).keep(full_tile(LENGTH, LENGTH, Visibility()), HEADS)
    assert torch.equal(mask[0], by_sample(slice(None)))
    assert mask[0, :, :5, 5:].all() and not mask[0, :, :5, :5].all()


def test_heads_are_drawn_in_passes_of_bounded_size(monkeypatch):
    expected = by_sample(slice(None))
    monkeypatch.setattr("megatron.core.attention.dropout.COUNTERS_PER_PASS", 1)
    tile = full_tile(LENGTH, LENGTH, Visibility())
    assert torch.equal(dropout([0] * 8, (BOUNDS, SAMPLES)).keep(tile, HEADS)[0], expected)


def test_kept_weights_are_scaled_by_the_inverse_of_their_share():
    tile = full_tile(LENGTH, LENGTH, Visibility())
    factors = dropout([3]).factors(tile, HEADS, torch.float64)
    assert factors.unique().tolist() == [0.0, pytest.approx(1 / 0.6, rel=1e-4)]
