"""A bias by head and distance: what a tile of pairs sees of it, and what its gradient is."""

import pytest
import torch

from megatron.core.attention.position_bias import of_distances, of_pairs
from megatron.core.attention.tiles import Visibility, full_tile

LENGTH, HEADS = 12, 2
TILES = [(0, 12, 0, 12), (0, 1, 0, 1), (11, 1, 0, 12), (3, 5, 7, 4), (7, 4, 3, 5), (9, 3, 0, 6)]
"""First query and number of queries, first key and number of keys."""


@pytest.mark.parametrize("first_query, num_queries, first_key, num_keys", TILES)
def test_tiles_see_the_bias_of_their_distances_and_give_its_gradient(first_query, num_queries, first_key, num_keys):
    full = full_tile(num_queries, num_keys, Visibility(False))
    tile = full._replace(query_position=first_query, key_position=first_key)
    bias = torch.randn(HEADS, 2 * LENGTH - 1, dtype=torch.float64, requires_grad=True)
    distance = torch.arange(num_keys) + first_key - torch.arange(num_queries)[:, None] - first_query
    expected = bias[:, LENGTH - 1 + distance]
    assert torch.equal(of_pairs(bias, tile), expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    (requested,) = torch.autograd.grad(expected, bias, upstream)
    torch.testing.assert_close(of_distances(upstream, bias, tile), requested)
