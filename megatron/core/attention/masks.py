"""The mask as data: causality, a window, documents; never a tensor of all pairs but on the plain path.

A query sees a key of its own document within a band around its position. Padded rows are documents too: what is used,
and the rest (:meth:`PackedSeqParams.of_lengths`); where keys are of another sequence, documents have bounds of queries
and others of keys (:meth:`PackedSeqParams.of_keys`).

Legend: b batch, s sequence, q query positions, k key positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.attention.dropout import WeightDropout
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.tiles import Bounds, Tile, Visibility


@dataclass(frozen=True)
class Mask:
    """Which keys the queries of a batch may see."""

    visibility: Visibility = Visibility()
    documents: PackedSeqParams | None = None
    """What whole sequences see, also where ranks hold parts of them."""
    hidden: Tensor | None = None
    """Bool, True where hidden, broadcasts to [b, a, q, k] and adds to the rest; plain path only."""
    dropout: WeightDropout | None = None
    """Dropout of the attention weights; plain path only."""
    bias: Tensor | None = None
    """Added to scaled scores by head and distance, [a, n] (``position_bias.py``)."""

    @property
    def bounds(self) -> tuple[Bounds, Bounds] | None:
        """The documents' boundaries among queries and among keys, on the host; None without documents."""
        return None if self.documents is None else self.documents.all_bounds()


@functools.lru_cache(maxsize=4)  # all layers of a kind ask for the same
@torch.inference_mode(False)  # what is kept must serve training too, which may save it for backward
def _hidden_pairs(
    num_queries: int, num_keys: int, left: int | None, right: int | None, device: torch.device | None
) -> Tensor:
    distance = torch.arange(num_keys, device=device) - torch.arange(num_queries, device=device).unsqueeze(1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return hidden


def hidden_pairs(tile: Tile, device: torch.device | None = None) -> Tensor | None:
    """[q, k], True where the tile's band hides a pair; None where it hides none."""
    return None if tile.is_full else _hidden_pairs(tile.num_queries, tile.num_keys, tile.left, tile.right, device)


def document_mask(documents: PackedSeqParams, batch: int, num_queries: int, num_keys: int) -> Tensor:
    """[b, 1, q, k]: pairs of tokens of different documents. Dense, for the reference path only."""

    def number(cu_seqlens: Tensor | None, length: int) -> Tensor:
        assert cu_seqlens is not None
        tokens = torch.arange(batch * length, device=cu_seqlens.device)
        return torch.bucketize(tokens, cu_seqlens[1:].to(tokens.dtype), right=True).view(batch, 1, length)

    queries, keys = number(documents.cu_seqlens_q, num_queries), number(documents.cu_seqlens_k, num_keys)
    return queries.unsqueeze(-1) != keys.unsqueeze(-2)
