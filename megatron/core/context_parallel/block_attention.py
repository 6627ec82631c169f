"""Attention over any number of key blocks: outputs merge by their log-sum-exp, gradients add up.

    out = sum_n exp(lse_n - lse) out_n,    lse = log sum_n exp(lse_n)       (Milakov and Gimelshein 2018)

Accumulators are fp32 (fp64 for fp64 inputs) and as large as the local queries, keys and values.

Legend: s sequence (local), b batch, a query heads, g key/value groups, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.context_parallel.kernels import BlockKernel, WeightDropout
from megatron.core.context_parallel.tiles import Tile


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_first(x: Tensor) -> Tensor:
    """[s, b, a, d] -> a view [b, a, s, d]."""
    return x.permute(1, 2, 0, 3)


def _rows(tile: Tile) -> slice:
    return slice(None) if tile.row is None else slice(tile.row, tile.row + 1)


def _at_queries(x: Tensor, tile: Tile) -> Tensor:
    return x[_rows(tile), :, tile.query : tile.query + tile.num_queries]


def _at_keys(x: Tensor, tile: Tile) -> Tensor:
    return x[_rows(tile), :, tile.key : tile.key + tile.num_keys]


class OnlineSoftmax:
    """Attention of local queries [s, b, a, d], block of keys after block of keys."""

    def __init__(self, query: Tensor, kernel: BlockKernel, dropout: WeightDropout | None = None) -> None:
        self.kernel, self.dropout = kernel, dropout
        self.query = heads_first(query)
        dtype = accumulator_dtype(query.dtype)
        self.out = torch.zeros(query.shape, dtype=dtype, device=query.device)
        self.lse = torch.full(self.query.shape[:3], -torch.inf, dtype=dtype, device=query.device)

    def add_block(self, key: Tensor, value: Tensor, tiles: Iterable[Tile]) -> None:
        """Keys and values [s, b, g, d] of one block, and where they are visible."""
        key, value, total = heads_first(key), heads_first(value), heads_first(self.out)
        for tile in tiles:
            out, lse = self.kernel.forward(
                _at_queries(self.query, tile), _at_keys(key, tile), _at_keys(value, tile), tile, self.dropout
            )
            out_so_far, lse_so_far = _at_queries(total, tile), _at_queries(self.lse, tile)
            # the share of the new block: exp(lse) / (exp(lse) + exp(lse_so_far)), 1 where nothing came before
            share = torch.sigmoid(lse - lse_so_far).unsqueeze(-1)
            out_so_far.lerp_(out.to(total.dtype), share)
            lse_so_far.copy_(torch.logaddexp(lse_so_far, lse))


class BlockGradients:
    """Backward of the same: the gradient of local queries adds up here, those of a block's keys and values go back."""

    def __init__(
        self, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, kernel: BlockKernel,
        dropout: WeightDropout | None = None
    ) -> None:  # fmt: skip
        self.kernel, self.dropout, self.lse = kernel, dropout, lse
        self.grad_out, self.query, self.out = heads_first(grad), heads_first(query), heads_first(out)
        self.grad_query = torch.zeros(query.shape, dtype=accumulator_dtype(query.dtype), device=query.device)

    def add_block(self, keys_values: Tensor, tiles: Iterable[Tile], grad_keys_values: Tensor) -> None:
        """Add a block's gradients to ``grad_keys_values`` [2, s, b, g, d]; ``keys_values`` is as large."""
        key, value = (heads_first(x) for x in keys_values)
        grad_key, grad_value = (heads_first(x) for x in grad_keys_values)
        grad_query = heads_first(self.grad_query)
        for tile in tiles:
            parts = self.kernel.backward(
                _at_queries(self.grad_out, tile), _at_queries(self.query, tile), _at_keys(key, tile),
                _at_keys(value, tile), _at_queries(self.out, tile), _at_queries(self.lse, tile), tile, self.dropout,
            )  # fmt: skip
            _at_queries(grad_query, tile).add_(parts[0])
            _at_keys(grad_key, tile).add_(parts[1])
            _at_keys(grad_value, tile).add_(parts[2])
