"""Score bias by head and distance (key position - query position), stored as [a, n].

The middle entry is distance 0, so that sequences of s tokens have n = 2 s - 1 on every rank, and no tensor of all pairs
is needed.

Legend: a heads (local), n distances, q queries and k keys of a tile."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.tiles import Tile


def zero_distance_index(bias: Tensor, tile: Tile) -> int:
    """Return the index in dim 1 of ``bias`` of the distance between the tile's first query and first key."""
    return bias.shape[1] // 2 + tile.key_position - tile.query_position


def of_pairs(bias: Tensor, tile: Tile) -> Tensor:
    """Expand ``bias`` [a, n] to the pairs of ``tile``, [a, q, k], in its dtype: a new tensor; differentiable."""
    first = zero_distance_index(bias, tile) - (tile.num_queries - 1)
    used = bias[:, first : first + tile.num_queries + tile.num_keys - 1]
    return used.unfold(1, tile.num_keys, 1).flip(1)


def of_distances(pairs: Tensor, bias: Tensor, tile: Tile) -> Tensor:
    """Sum ``pairs`` [a, q, k] by distance into a new tensor with the shape of ``bias`` [a, n] and the dtype of
    ``pairs``, zero for distances that the tile does not have; the backward of :func:`of_pairs`."""
    heads, num_queries, num_keys = pairs.shape
    size, margin = num_queries + num_keys - 1, num_queries - 1
    # a row stride of width + 1 shifts each row by one column: each column of the view is one diagonal (distance)
    padded = F.pad(pairs, (margin, margin))
    width = padded.shape[2]
    sums = padded.as_strided((heads, num_queries, size), (num_queries * width, width + 1, 1)).sum(1)
    first = zero_distance_index(bias, tile) - margin
    return F.pad(sums, (first, bias.shape[1] - first - size))
