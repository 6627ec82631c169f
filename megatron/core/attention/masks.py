"""Attention masks as data: causality, window and documents. Only the unfused kernel builds a tensor of all pairs.

A query sees the keys of its document within a band around its position. A padded row is two documents, its tokens and
its padding (:meth:`PackedSeqParams.of_lengths`). In cross-attention, documents have separate bounds for queries and
keys (:meth:`PackedSeqParams.of_keys`).

Legend: b batch, s sequence, q query positions, k key positions."""

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
    """Visible query-key pairs of a batch, with dropout, bias and sink of their softmax."""

    visibility: Visibility = Visibility()
    documents: PackedSeqParams | None = None
    """Document bounds in full sequences, also with context parallelism."""
    hidden: Tensor | None = None
    """Dense mask, bool, True where hidden, broadcastable to [b, a, q, k], in addition; unfused and torch kernels."""
    dropout: WeightDropout | None = None
    """Dropout of attention weights; unfused kernel only."""
    bias: Tensor | None = None
    """Bias [a, n] added to scaled scores by head and distance (``position_bias.py``)."""
    sink: Tensor | None = None
    """Logit [a] per head in every softmax (``sink.py``); attention over key blocks only."""

    @property
    def bounds(self) -> tuple[Bounds, Bounds] | None:
        """Host bounds of query and key documents; None without documents. The first access may wait for the GPU."""
        return None if self.documents is None else self.documents.all_bounds()


@functools.lru_cache(maxsize=4)  # equal for all layers of one kind
@torch.inference_mode(False)  # the cached tensor may be saved for backward later, which inference tensors cannot
def _hidden_pairs(
    num_queries: int, num_keys: int, left: int | None, right: int | None, device: torch.device | None
) -> Tensor:
    """Return bool [q, k], True where the distance key - query index is below -``left`` or above ``right`` (None: no
    limit). Cached for four sets of arguments: do not write to the result."""
    distance = torch.arange(num_keys, device=device) - torch.arange(num_queries, device=device).unsqueeze(1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return hidden


def hidden_pairs(tile: Tile, device: torch.device | None = None) -> Tensor | None:
    """Return bool [q, k], True for pairs outside the tile's band; None if the tile is full. Cached: do not write."""
    return None if tile.is_full else _hidden_pairs(tile.num_queries, tile.num_keys, tile.left, tile.right, device)


def document_mask(documents: PackedSeqParams, batch: int, num_queries: int, num_keys: int) -> Tensor:
    """Return the dense mask [b, 1, q, k], True for pairs of tokens of different documents. No host sync. Needs memory
    for all pairs: for the unfused kernel, and for bounds that only the GPU knows."""

    def number(cu_seqlens: Tensor | None, length: int) -> Tensor:
        assert cu_seqlens is not None
        tokens = torch.arange(batch * length, device=cu_seqlens.device)
        return torch.bucketize(tokens, cu_seqlens[1:].to(tokens.dtype), right=True).view(batch, 1, length)

    queries, keys = number(documents.cu_seqlens_q, num_queries), number(documents.cu_seqlens_k, num_keys)
    return queries.unsqueeze(-1) != keys.unsqueeze(-2)
