"""Unfused attention in torch operations: the reference, the only kernel with dropout, and the fallback.

Full sequences are computed in the inputs' dtype with the operation order of Megatron-LM's unfused path. Key blocks are
computed in fp32 (fp64 for fp64) with a hand-written backward: their gradients depend on the merged result of all
blocks, which autograd of one block does not know.

Legend: s, t query and key sequence, b batch, a query heads, g key/value groups, p query heads per group, d
head dim, e head dim of values; q, k queries and keys of a tile."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor

from megatron.core.attention.dropout import WeightDropout
from megatron.core.attention.masks import Mask, document_mask, hidden_pairs
from megatron.core.attention.position_bias import of_distances, of_pairs
from megatron.core.attention.tiles import Tile, full_tile


class UnfusedAttention:
    """Scores, mask, softmax and dropout as separate torch operations.

    Args:
        scale: factor of QK^T.
        layer_scale: divisor of scores before they are rounded; the fp32 softmax multiplies by it again.
        softmax_in_fp32: fp32 softmax on full sequences; blocks always use fp32.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap) before bias and mask."""

    def __init__(
        self, scale: float, *, layer_scale: float = 1.0, softmax_in_fp32: bool = False, soft_cap: float | None = None
    ) -> None:
        self.scale, self.layer_scale, self.soft_cap = scale, layer_scale, soft_cap
        self.dropout: WeightDropout | None = None
        """Dropout of key blocks; see :meth:`with_mask`. On full sequences the mask carries it."""
        self.bias: Tensor | None = None
        """Position bias [a, n] of key blocks, likewise."""
        self._softmax = self._softmax_in_fp32 if softmax_in_fp32 else partial(torch.softmax, dim=-1)

    def _softmax_in_fp32(self, scores: Tensor) -> Tensor:
        dtype = torch.promote_types(scores.dtype, torch.float32)
        return torch.softmax(scores.to(dtype) * self.layer_scale, dim=-1).to(scores.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [s, b, a, d], key [t, b, g, d] and value [t, b, g, e] to [s, b, a, e] in the inputs' dtype;
        differentiable by autograd, which saves the weights [b, a, s, t]. Supports everything in ``mask``: band,
        documents, dense mask, dropout and bias. Hidden scores become the dtype's minimum, so a query without visible
        keys averages all values."""
        num_queries, batch, heads, _ = query.shape
        num_keys, kv_groups = key.shape[0], key.shape[2]
        tile = full_tile(num_queries, num_keys, mask.visibility)
        # one GEMM per group computes all of its query heads: keys and values are not repeated
        grouped = query.unflatten(2, (kv_groups, -1)).permute(1, 2, 3, 0, 4).flatten(2, 3)
        scaled_keys = key.permute(1, 2, 3, 0) * (self.scale / self.layer_scale)
        scores = torch.matmul(grouped, scaled_keys).view(batch, heads, num_queries, num_keys)
        if self.soft_cap is not None:
            cap = self.soft_cap / self.layer_scale
            scores = torch.tanh(scores / cap) * cap
        if mask.bias is not None:
            scores = scores + (of_pairs(mask.bias, tile) / self.layer_scale).to(scores.dtype)
        masks = [hidden_pairs(tile, query.device), mask.hidden]
        if mask.documents is not None and mask.documents.cu_seqlens_q is not None:
            masks.append(document_mask(mask.documents, batch, num_queries, num_keys))
        for hidden in masks:
            if hidden is not None:
                scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = self._softmax(scores)
        if mask.dropout is not None:
            weights = mask.dropout(weights, tile)
        weights = weights.view(batch, kv_groups, -1, num_keys)
        mixed = torch.matmul(weights, value.permute(1, 2, 0, 3)).view(batch, heads, num_queries, value.shape[-1])
        return mixed.permute(2, 0, 1, 3)

    def with_mask(self, mask: Mask) -> UnfusedAttention:
        """Return a copy for the key blocks of one micro-batch, with the dropout and bias of ``mask``."""
        kernel = copy.copy(self)
        kernel.dropout, kernel.bias = mask.dropout, mask.bias
        return kernel

    def _scores(self, query: Tensor, key: Tensor, tile: Tile) -> tuple[Tensor, Tensor | float]:
        """Return (scores [b, g, p, q, k], their derivative by QK^T) for ``tile``: scaled, capped, with the bias if set,
        and -inf where hidden. The derivative is a number, or with a soft cap a tensor; it includes the scale."""
        grouped = query.unflatten(1, (key.shape[1], -1))
        scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)) * self.scale
        slope: Tensor | float = self.scale
        if self.soft_cap is not None:
            share = torch.tanh(scores / self.soft_cap)
            scores, slope = share * self.soft_cap, (1 - share.square()) * self.scale
        if self.bias is not None:
            scores = scores + _wide(of_pairs(self.bias, tile)).unflatten(0, scores.shape[1:3])
        hidden = hidden_pairs(tile, query.device)
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf), slope

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Attend to the pairs of ``tile``: query [b, a, q, d], key [b, g, k, d], value [b, g, k, e] -> out [b, a, q, e]
        and lse [b, a, q], both fp32 (fp64 for fp64), with dropout if set. ``lse`` is without dropout. A query that sees
        no key of the tile gets NaN. Not for autograd: see :meth:`backward`."""
        query, key, value = (_wide(x) for x in (query, key, value))
        scores, _ = self._scores(query, key, tile)
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = torch.exp(scores - lse)
        if self.dropout is not None:
            weights *= self.dropout.factors(tile, query.shape[1], weights.dtype).view_as(weights)
        return torch.matmul(weights, value.unsqueeze(2)).flatten(1, 2), lse.squeeze(-1).flatten(1, 2)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, ...]:
        """Return the tile's gradients of query, key, value and, if set, the bias [a, n], in fp32 (fp64 for fp64).
        Recomputes scores and dropout masks. ``out`` and ``lse`` must be merged over all blocks."""
        grad, query, key, value, out = (_wide(x) for x in (grad, query, key, value, out))
        groups = (key.shape[1], -1)
        scores, slope = self._scores(query, key, tile)
        weights = torch.exp(scores - lse.unflatten(1, groups).unsqueeze(-1))
        # dS = P (dP - delta); delta = sum_k dP_k P_k over all blocks (dropout included) is the dot product of grad and
        # the merged out: the tile's own out would give the gradients of a separate softmax
        delta = (grad * out).sum(-1, keepdim=True).unflatten(1, groups)
        grad = grad.unflatten(1, groups)
        grad_weights = torch.matmul(grad, value.unsqueeze(2).transpose(-1, -2))
        dropped = weights
        if self.dropout is not None:
            factors = self.dropout.factors(tile, query.shape[1], weights.dtype).view_as(weights)
            dropped, grad_weights = weights * factors, grad_weights * factors
        grad_value = torch.matmul(dropped.transpose(-1, -2), grad).sum(2)
        grad_scores = weights * (grad_weights - delta)
        of_bias = () if self.bias is None else (of_distances(grad_scores.sum(0).flatten(0, 1), self.bias, tile),)
        grad_scores *= slope
        grad_query = torch.matmul(grad_scores, key.unsqueeze(2)).flatten(1, 2)
        grad_key = torch.matmul(grad_scores.transpose(-1, -2), query.unflatten(1, groups)).sum(2)
        return grad_query, grad_key, grad_value, *of_bias


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
