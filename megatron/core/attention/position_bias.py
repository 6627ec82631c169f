"""A bias on scores by head and distance (key - query), as data: [a, n], the middle one for a key at the query itself.

So a sequence of s tokens has n = 2 s - 1, whichever rank holds which of them, and no tensor of all pairs is needed.

Legend: a heads (local), n distances, q queries and k keys of a tile.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.tiles import Tile


def middle_of(bias: Tensor, tile: Tile) -> int:
    """Where the bias of the tile's first query and first key stands."""
    return bias.shape[1] // 2 + tile.key_position - tile.query_position


def of_pairs(bias: Tensor, tile: Tile) -> Tensor:
    """[a, q, k] of the tile; differentiable."""
    first = middle_of(bias, tile) - (tile.num_queries - 1)
    used = bias[:, first : first + tile.num_queries + tile.num_keys - 1]
    return used.unfold(1, tile.num_keys, 1).flip(1)


def of_distances(pairs: Tensor, bias: Tensor, tile: Tile) -> Tensor:
    """Sums of ``pairs`` [a, q, k] by distance, in the shape of ``bias``: the gradient of :func:`of_pairs`."""
    heads, num_queries, num_keys = pairs.shape
    size, margin = num_queries + num_keys - 1, num_queries - 1
    # a row further, a column further: rows of the padded tensor that begin one later each hold one diagonal per column
    padded = F.pad(pairs, (margin, margin))
    width = padded.shape[2]
    sums = padded.as_strided((heads, num_queries, size), (num_queries * width, width + 1, 1)).sum(1)
    first = middle_of(bias, tile) - margin
    return F.pad(sums, (first, bias.shape[1] - first - size))
