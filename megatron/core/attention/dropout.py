"""Layout-independent dropout of attention weights.

The mask is a function of sample, layer, global head, query position and key position, so that parallel layout, key
blocks and context-parallel strategy do not change it. Only the unfused kernel supports it: fused kernels generate masks
that depend on the kernel's tiling.

Legend: b batch, a heads (local), q queries, k keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.attention.tiles import Tile
from megatron.core.random.dropout import COUNTERS_PER_PASS, ScaleByMask
from megatron.core.random.philox import DropoutStream


@dataclass(frozen=True)
class WeightDropout:
    """Inverted dropout of one layer's attention weights in one micro-batch."""

    stream: DropoutStream
    rate: float
    site: tuple[str | int, ...]
    first_head: int
    """Global index of the first local head."""
    sample_b: Tensor
    """Global sample counter, int64 [b]."""

    @property
    def scale(self) -> float:
        """Scale of kept weights: 1 / (1 - rate), with the rate rounded to the generator's multiple of 2**-16."""
        return 1.0 / (1.0 - DropoutStream.exact_rate(self.rate))

    def keep(self, tile: Tile, num_heads: int) -> Tensor:
        """Return the mask of kept weights of ``tile`` for the first ``num_heads`` local heads, bool [b, a, q, k], True
        with probability 1 - rate; b is 1 for a tile of one row. A pure function of global positions. Positions must be
        consecutive: tiles that merge ranges (``plan_tiles(merge=True)``) would get wrong masks."""
        device = self.sample_b.device
        samples = self.sample_b if tile.row is None else self.sample_b[tile.row : tile.row + 1]
        positions = torch.arange(tile.query_position, tile.query_position + tile.num_queries, device=device)
        heads = torch.arange(self.first_head, self.first_head + num_heads, device=device)[:, None, None]
        keys = range(tile.key_position, tile.key_position + tile.num_keys)
        mask = torch.empty(len(samples), num_heads, tile.num_queries, tile.num_keys, dtype=torch.bool, device=device)
        step = max(1, COUNTERS_PER_PASS * 8 // max(1, tile.num_queries * tile.num_keys))
        for row, sample in zip(mask, samples, strict=True):
            for first in range(0, num_heads, step):
                row[first : first + step] = self.stream.keep_mask(
                    self.rate, self.site, sample, positions[None, :, None], heads[first : first + step], keys
                )
        return mask

    def __call__(self, weights: Tensor, tile: Tile) -> Tensor:
        """Drop out ``weights`` [b, a, q, k] of ``tile``; differentiable, saves the bool mask for backward."""
        return ScaleByMask.apply(weights, self.keep(tile, weights.shape[1]), self.scale)

    def factors(self, tile: Tile, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the multipliers of weights, ``dtype`` [b, a, q, k]: 0 where dropped, else :attr:`scale`."""
        return self.keep(tile, num_heads).to(dtype).mul_(self.scale)
