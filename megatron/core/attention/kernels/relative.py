"""Attention with a bias by head and distance, on full sequences, in Triton (``fusions/relative_attention.py``).

Legend: s sequence, b batch, a query heads, g key/value groups, d head dim, n distances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.kernels.base import NO_SOFT_CAP, SIXTEEN_BIT, Request
from megatron.core.attention.masks import Mask
from megatron.core.attention.position_bias import of_distances, zero_distance_index
from megatron.core.attention.tiles import Tile, full_tile
from megatron.core.autograd_context import AutogradContext
from megatron.core.config.errors import UserError
from megatron.core.fusions.dispatch import kernels_serve
from megatron.core.fusions.relative_attention import Pairs, relative_attention, relative_attention_backward


def supports(request: Request) -> str | None:
    """Return why the Triton kernels do not support ``request``; None if they do. They need Triton, a GPU from sm_80 on,
    bf16 or fp16, heads of 16, 32, 64 or 128 channels, full sequences, and no soft cap. A bias is not required here."""
    if not kernels_serve(request.dtype) or request.dtype not in SIXTEEN_BIT:
        return "Triton's kernels need the package, a GPU, and bfloat16 or float16"
    if request.capability is None or request.capability < (8, 0) or request.channels not in (16, 32, 64, 128):
        return "Triton's kernels take heads of 16, 32, 64 or 128 channels, from sm_80 on"
    if request.blocks:
        return "Triton's kernels take whole sequences without sinks, as --cp-comm-type a2a gives"
    return None if request.soft_cap is None else NO_SOFT_CAP


class _Attend(torch.autograd.Function):
    """Autograd wrapper; forward saves query, key, value, output, log-sum-exp and bias."""

    @staticmethod
    def forward(ctx: AutogradContext, bias: Tensor, *args: Any) -> Tensor:
        """Return out [b, a, s, d] for (query, key, value, scale, tile, document ranges) in ``args`` with the position
        bias [a, n]. Saves the inputs, output, log-sum-exp and bias."""
        query, key, value, scale, tile, ranges = args
        pairs = Pairs(zero_distance_index(bias, tile), tile.left, tile.right, ranges)
        out, lse = relative_attention(query, key, value, bias, scale, pairs)
        ctx.save_for_backward(query, key, value, out, lse, bias)
        ctx.scale, ctx.pairs, ctx.tile = scale, pairs, tile
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # recomputation lets them be read once
        *grads, of_pairs = relative_attention_backward(grad, saved, ctx.scale, ctx.pairs)
        return of_distances(of_pairs, saved[-1], ctx.tile), *grads, None, None, None


class RelativeAttention:
    """Softmax attention with a bias by distance. Documents and padding are key ranges per query; no dense masks."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [s, b, a, d], key and value [t, b, g, d] to [s, b, a, d] with ``mask.bias``, which is required;
        differentiable, also in the bias. Documents limit the keys of each query."""
        assert mask.dropout is None and mask.bias is not None
        if mask.hidden is not None:
            raise UserError(
                "attention_mask: kernels for relative positions take no dense masks; describe documents by "
                "packed_seq_params, or choose --attention-backend unfused"
            )
        tile, documents = full_tile(len(query), len(key), mask.visibility), mask.documents
        ranges = None if documents is None else documents.ranges(query.shape[1], len(query))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return _Attend.apply(mask.bias, query, key, value, self.scale, tile, ranges).permute(2, 0, 1, 3)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Not implemented: :func:`supports` rejects key blocks."""
        raise NotImplementedError

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, ...]:
        """Not implemented, as :meth:`forward`."""
        raise NotImplementedError
