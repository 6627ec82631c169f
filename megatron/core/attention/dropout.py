"""Layout-independent dropout of attention weights.

The mask is a function of sample, layer, global head, query position and key position, so that parallel layout, key
blocks and context-parallel strategy do not change it. Only the unfused kernel supports it: fused kernels generate masks
that depend on the kernel's tiling.

Legend: b batch, a heads (local), q queries, k keys of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.attention.tiles import Bounds, Tile
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
    documents: tuple[Bounds, tuple[int, ...]] | None = None
    """Bounds of the samples that are packed into one row, and their sample counters, which replace ``sample_b``; None:
    each row is a sample."""

    @property
    def scale(self) -> float:
        """Scale of kept weights: 1 / (1 - rate), with the rate rounded to the generator's multiple of 2**-16."""
        return 1.0 / (1.0 - DropoutStream.exact_rate(self.rate))

    def keep(self, tile: Tile, num_heads: int) -> Tensor:
        """Return the mask of kept weights of ``tile`` for the first ``num_heads`` local heads, bool [b, a, q, k], True
        with probability 1 - rate; b is 1 for a tile of one row. A pure function of global positions, which count within
        each of packed samples; True for pairs of different samples, which are hidden. Positions must be consecutive:
        tiles that merge ranges (``plan_tiles(merge=True)``) would get wrong masks."""
        device, shape = self.sample_b.device, (num_heads, tile.num_queries, tile.num_keys)
        rows = 1 if self.documents is not None or tile.row is not None else len(self.sample_b)
        heads = torch.arange(self.first_head, self.first_head + num_heads, device=device)[:, None, None]
        mask = torch.ones(rows, *shape, dtype=torch.bool, device=device)
        for rows_of_part, sample, start, queries, keys in self._parts(tile):
            first_query, first_key = queries.start - tile.query_position, keys.start - tile.key_position
            part = mask[rows_of_part, :, first_query:, first_key:][:, :, : len(queries), : len(keys)]
            positions = torch.arange(queries.start - start, queries.stop - start, device=device)[:, None]
            features = range(keys.start - start, keys.stop - start)
            step = max(1, COUNTERS_PER_PASS * 8 // max(1, len(part) * len(queries) * len(keys)))
            for first in range(0, num_heads, step):
                part[:, first : first + step] = self.stream.keep_mask(
                    self.rate, self.site, sample, positions, heads[first : first + step], features
                )
        return mask

    def _parts(self, tile: Tile) -> Iterator[tuple[slice, Tensor, int, range, range]]:
        """Yield (rows of the mask, their sample counters, first position, query positions, key positions) of ``tile``:
        all rows that one pass computes, or one of the samples that share a row."""
        queries = range(tile.query_position, tile.query_position + tile.num_queries)
        keys = range(tile.key_position, tile.key_position + tile.num_keys)
        if self.documents is None:
            of_rows = self.sample_b if tile.row is None else self.sample_b[tile.row : tile.row + 1]
            step = max(1, COUNTERS_PER_PASS * 8 // max(1, len(queries) * len(keys)))
            for first in range(0, len(of_rows), step):
                rows = slice(first, first + step)
                yield rows, of_rows[rows, None, None, None], 0, queries, keys
            return
        bounds, samples = self.documents
        for start, stop, index in zip(bounds, bounds[1:], samples):
            of_queries, of_keys = (range(max(start, span.start), min(stop, span.stop)) for span in (queries, keys))
            if of_queries and of_keys:
                # a fill does not wait for the device, as a copy from the host does
                sample = torch.full((), index, dtype=torch.int64, device=self.sample_b.device)
                yield slice(None), sample, start, of_queries, of_keys

    def __call__(self, weights: Tensor, tile: Tile) -> Tensor:
        """Drop out ``weights`` [b, a, q, k] of ``tile``; differentiable, saves the bool mask for backward."""
        return ScaleByMask.apply(weights, self.keep(tile, weights.shape[1]), self.scale)

    def factors(self, tile: Tile, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the multipliers of weights, ``dtype`` [b, a, q, k]: 0 where dropped, else :attr:`scale`."""
        return self.keep(tile, num_heads).to(dtype).mul_(self.scale)
