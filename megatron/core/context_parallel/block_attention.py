"""Attention over any number of key blocks: outputs merge by their log-sum-exp, gradients add up.

    out = sum_n exp(lse_n - lse) out_n,    lse = log sum_n exp(lse_n)       (Milakov and Gimelshein 2018)

Accumulators are fp32 (fp64 for fp64 inputs) and as large as the local queries, keys and values.

Legend: s sequence (local), b batch, a query heads, g key/value groups, d head dim; t tokens of packed documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.context_parallel.kernels import BlockKernel, FusedBlocks, WeightDropout
from megatron.core.context_parallel.packing import Segments, group_tiles, segments
from megatron.core.context_parallel.tiles import Tile
from megatron.core.fusions.merge_attention import merge_attention_


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, a, ...] -> a view [b, a, s, ...]."""
    return x.movedim(0, 2)


def _tokens(x: Tensor) -> Tensor:
    """[s, b, a, ...] -> [s * b, a, ...], a view of contiguous tensors."""
    return x.flatten(0, 1)


def _rows(tile: Tile) -> slice:
    return slice(None) if tile.row is None else slice(tile.row, tile.row + 1)


def _at_queries(x: Tensor, tile: Tile) -> Tensor:
    return _heads_first(x)[_rows(tile), :, tile.query : tile.query + tile.num_queries]


def _at_keys(x: Tensor, tile: Tile) -> Tensor:
    return _heads_first(x)[_rows(tile), :, tile.key : tile.key + tile.num_keys]


def _apart(tiles: tuple[Tile, ...], x: Tensor, kernel: BlockKernel) -> tuple[tuple[Tile, ...], list[Segments]]:
    """Tiles for single calls, and documents for calls of a kernel that takes many of them."""
    if not kernel.packs_documents or not tiles or tiles[0].row is None:
        return tiles, []
    return (), [segments(group, x.shape[1], x.device) for group in group_tiles(tiles)]


class OnlineSoftmax:
    """Attention of local queries [s, b, a, d], block of keys after block of keys."""

    def __init__(self, query: Tensor, kernel: BlockKernel, dropout: WeightDropout | None = None) -> None:
        self.query, self.kernel, self.dropout = query, kernel, dropout
        dtype = accumulator_dtype(query.dtype)
        self.out = torch.empty(query.shape, dtype=dtype, device=query.device)
        self.lse = torch.empty(query.shape[:3], dtype=dtype, device=query.device)
        self._started = False

    def add_block(self, key: Tensor, value: Tensor, tiles: tuple[Tile, ...]) -> None:
        """Keys and values [s, b, g, d] of one block, and where they are visible."""
        single, packed = _apart(tiles, self.query, self.kernel)
        for tile in single:
            out, lse = self.kernel.forward(
                _at_queries(self.query, tile), _at_keys(key, tile), _at_keys(value, tile), tile, self.dropout
            )
            if not self._started and tile.row is None and tile.num_queries == len(self.query):
                _at_queries(self.out, tile).copy_(out)  # saves two passes over the output
                _at_queries(self.lse, tile).copy_(lse)
                self._started = True
                continue
            self._start()
            merge_attention_(_at_queries(self.out, tile), _at_queries(self.lse, tile), out, lse)
        for at in packed:
            self._add_packed(key, value, at)

    def _start(self) -> None:
        """No key has been seen."""
        if not self._started:
            self.out.zero_()
            self.lse.fill_(-torch.inf)
            self._started = True

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output [s, b, a, d] in the queries' dtype and log-sum-exp [s, b, a] over all blocks."""
        self._start()
        return self.out.to(self.query.dtype), self.lse

    def _add_packed(self, key: Tensor, value: Tensor, at: Segments) -> None:
        assert isinstance(self.kernel, FusedBlocks)
        self._start()
        query = _tokens(self.query).index_select(0, at.query_index)
        key, value = (_tokens(x).index_select(0, at.key_index) for x in (key, value))
        out, lse = self.kernel.forward_packed(query, key, value, at)
        total, total_lse = _tokens(self.out), _tokens(self.lse)
        merged, merged_lse = total.index_select(0, at.query_index), total_lse.index_select(0, at.query_index)
        merge_attention_(*(x.transpose(0, 1).unsqueeze(0) for x in (merged, merged_lse, out, lse)))
        total.index_copy_(0, at.query_index, merged)
        total_lse.index_copy_(0, at.query_index, merged_lse)


class BlockGradients:
    """Backward of the same: the gradient of local queries adds up here, those of a block's keys and values go back."""

    def __init__(
        self, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, kernel: BlockKernel,
        dropout: WeightDropout | None = None
    ) -> None:  # fmt: skip
        self.kernel, self.dropout = kernel, dropout
        self.grad_out, self.query, self.out, self.lse = grad, query, out, lse
        self.grad_query = torch.zeros(query.shape, dtype=accumulator_dtype(query.dtype), device=query.device)

    def add_block(self, keys_values: Tensor, tiles: tuple[Tile, ...], grad_keys_values: Tensor) -> None:
        """Add a block's gradients to ``grad_keys_values`` [2, s, b, g, d]; ``keys_values`` is as large."""
        (key, value), (grad_key, grad_value) = keys_values, grad_keys_values
        single, packed = _apart(tiles, self.query, self.kernel)
        for tile in single:
            at_queries = [_at_queries(x, tile) for x in (self.grad_out, self.query, self.out, self.lse)]
            parts = self.kernel.backward(
                at_queries[0], at_queries[1], _at_keys(key, tile), _at_keys(value, tile), at_queries[2], at_queries[3],
                tile, self.dropout,
            )  # fmt: skip
            _at_queries(self.grad_query, tile).add_(parts[0])
            _at_keys(grad_key, tile).add_(parts[1])
            _at_keys(grad_value, tile).add_(parts[2])
        for at in packed:
            self._add_packed(keys_values, at, grad_keys_values)

    def _add_packed(self, keys_values: Tensor, at: Segments, grad_keys_values: Tensor) -> None:
        assert isinstance(self.kernel, FusedBlocks)
        grad, query, out, lse = (
            _tokens(x).index_select(0, at.query_index) for x in (self.grad_out, self.query, self.out, self.lse)
        )
        key, value = (_tokens(x).index_select(0, at.key_index) for x in keys_values)
        parts = self.kernel.backward_packed(grad, query, key, value, out, lse, at)
        totals = (self.grad_query, at.query_index), *((x, at.key_index) for x in grad_keys_values)
        for (total, index), part in zip(totals, parts, strict=True):
            tokens = _tokens(total)
            tokens[index] = tokens[index] + part  # no index is in it twice
