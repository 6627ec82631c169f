"""Attention over a batch in which the last rows have padding, with a kernel that is fast on full rows.

All rows are computed as if they were full; then the rows with padding are computed again as packed documents, and these
results replace the first ones. cuDNN reads and writes full rows in place, while packing copies every token in both
directions and uses a slower kernel. In a BERT-large step (64 rows of 512 tokens, a tenth of them short, H200) attention
and its copies take 114 ms, against 180 ms with all rows packed.

Legend: s, t query and key sequence, b batch, a query heads, g key/value groups, d head dim, n packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.attention.kernels.base import FlashKernel
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.tiles import Tile, full_tile
from megatron.core.autograd_context import AutogradContext


def attend_padded_rows(
    kernel: FlashKernel, query: Tensor, key: Tensor, value: Tensor, mask: Mask, num_full: int, rest: PackedSeqParams
) -> Tensor:
    """Map query [s, b, a, d], key and value [t, b, g, d] to [s, b, a, d]; differentiable. Computes all rows as full
    rows, then the rows from ``num_full`` on again as packed documents, which replace the first results. Does not read a
    dense mask, dropout or bias.

    Args:
        mask: must have no window; its documents are ignored.
        num_full: number of leading rows that are one document each.
        rest: documents of the remaining rows."""
    tile = full_tile(len(query), len(key), mask.visibility)
    bounds, max_lengths = (rest.cu_seqlens_q, rest.cu_seqlens_k), (len(query), len(key))
    return _PaddedRows.apply(kernel, query, key, value, tile, num_full, (*bounds, *max_lengths))


class _PaddedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        kernel: FlashKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tile: Tile,
        num_full: int,
        shape: tuple,
    ) -> Tensor:
        """Return [s, b, a, d]: all rows computed as full rows, then the rows from ``num_full`` on replaced by packed
        attention over the bounds in ``shape``. Saves both sets of inputs, outputs and log-sum-exps. The result is the
        kernel's output, overwritten in place."""
        out, lse = kernel.forward(_by_rows(query), _by_rows(key), _by_rows(value), tile)
        ctx.kernel, ctx.tile, ctx.num_full, ctx.shape = kernel, tile, num_full, shape
        ctx.window = (-1, -1) if tile.is_full else (-1, 0)
        packed = _packed(query, num_full), _packed(key, num_full), _packed(value, num_full)
        rest, rest_lse = kernel._flash(*packed, shape, ctx.window)
        mixed = _with_rest(out, rest, num_full)
        ctx.save_for_backward(query, key, value, mixed, lse, *packed, rest, rest_lse)
        return mixed

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of query, key and value [s, b, heads, d]: all rows by the backward of full rows, then
        the rows from ``num_full`` on overwritten in place by the packed backward."""
        query, key, value, mixed, lse, *packed, rest_lse = ctx.saved_tensors
        # rows are independent: the padded rows' wrong gradients affect no other row and are overwritten below
        grads = ctx.kernel.backward(*map(_by_rows, (grad, query, key, value, mixed)), lse, ctx.tile)
        of_rest = ctx.kernel._flash_backward([_packed(grad, ctx.num_full), *packed], rest_lse, ctx.shape, ctx.window)
        input_grads = (_with_rest(rows, part, ctx.num_full) for rows, part in zip(grads, of_rest))
        return None, *input_grads, None, None, None


def _by_rows(x: Tensor) -> Tensor:
    """View [s, b, a, d] as [b, a, s, d]."""
    return x.permute(1, 2, 0, 3)


def _packed(x: Tensor, num_full: int) -> Tensor:
    """Copy the rows of ``x`` [s, b, a, d] from index ``num_full`` into packed tokens [n, a, d]."""
    return x[:, num_full:].transpose(0, 1).flatten(0, 1)


def _with_rest(rows: Tensor, packed: Tensor, num_full: int) -> Tensor:
    """View ``rows`` [b, a, s, d] as [s, b, a, d]; overwrite those from ``num_full`` on by ``packed`` [n, a, d]."""
    rows = rows.permute(2, 0, 1, 3)
    rows[:, num_full:] = packed.unflatten(0, (-1, len(rows))).transpose(0, 1)
    return rows
