"""Maximum attention logit of each head since the last reset, for QK-Clip and logs.

The scores are computed a second time, in blocks of queries, so that any attention kernel can be used: the cost is Q K^T
of the visible pairs, about a quarter of the forward pass, plus a block of scores in memory. Context-parallel ranks
all-gather the keys in every form of attention, and have the maxima of their queries. Without context parallelism, pairs
that are hidden by packed documents whose bounds only the GPU knows count too, as do those hidden by a dense mask: the
result is then an upper bound. Padding at the end of a row does not count."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.attention.masks import Mask, hidden_pairs
from megatron.core.attention.tiles import Tile, plan_tiles
from megatron.core.attention.token_layout import ONE_RANK, TokenLayout

_BLOCK = 1024
"""Queries per block: at 8 heads and 8,192 keys, 128 MiB of bf16 scores."""


class MaxLogits:
    """Accumulator of one core attention: ``values`` [a] in fp32 (fp64 for fp64), -inf before the first call.
    Recomputation may call it again: a maximum does not change."""

    def __init__(self, scale: float, layer_number: int) -> None:
        self.scale, self.layer_number = scale, layer_number
        self.values: Tensor | None = None

    @torch.no_grad()
    def add(self, query: Tensor, key: Tensor, mask: Mask, layout: TokenLayout = ONE_RANK) -> None:
        """Take the maximum over the visible pairs of query [s, b, a, d] and key [s, b, g, d], the tokens of ``layout``
        of the same sequences. Collective over its ranks. No host sync on one rank."""
        length = layout.full_length(len(query))
        end = length - layout.padding
        spans = tuple((first, min(last, end)) for first, last in layout.spans(length) if first < end)
        has_bounds = mask.documents is not None and (mask.documents.known or layout.group.size > 1)
        bounds = mask.bounds[0] if has_bounds and mask.bounds is not None else None
        wide = torch.promote_types(query.dtype, torch.float32)
        if self.values is None:
            self.values = query.new_full((query.shape[2],), -torch.inf, dtype=wide)
        grouped = query.unflatten(2, (key.shape[2], -1)).permute(1, 2, 3, 0, 4)  # [b, g, p, s, d]
        keys = layout.full(key, 0).permute(1, 2, 3, 0).unsqueeze(2)
        for tile in plan_tiles(spans, ((0, length),), mask.visibility, length, bounds) if spans else ():
            rows = slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
            for block in _blocks(tile):
                scores = torch.matmul(
                    grouped[rows, ..., block.query : block.query + block.num_queries, :],
                    keys[rows, ..., block.key : block.key + block.num_keys],
                )
                if (hidden := hidden_pairs(block, query.device)) is not None:
                    scores = scores.masked_fill_(hidden, -torch.inf)
                maximum = scores.amax((0, 3, 4)).flatten().to(wide) * self.scale
                self.values.copy_(torch.maximum(self.values, maximum))

    def take(self, like: Tensor, heads: int) -> Tensor:
        """Return the maxima [a] and start again; without calls -inf on the device of ``like``."""
        if self.values is None:
            return torch.full((heads,), -torch.inf, device=like.device)
        maxima = self.values.clone()
        self.values.fill_(-torch.inf)
        return maxima


def _blocks(tile: Tile) -> Iterator[Tile]:
    """Yield blocks of the queries of ``tile``, each with the keys that they see."""
    for start in range(0, tile.num_queries, _BLOCK):
        stop = min(start + _BLOCK, tile.num_queries)
        low = 0 if tile.left is None else max(0, start - tile.left)
        high = tile.num_keys if tile.right is None else min(tile.num_keys, stop + tile.right)
        # the band counts from the block's first query and key
        left = None if tile.left is None else tile.left + low - start
        right = None if tile.right is None else tile.right - low + start
        yield Tile(tile.row, tile.query + start, stop - start, tile.key + low, high - low, left, right, 0, 0)
