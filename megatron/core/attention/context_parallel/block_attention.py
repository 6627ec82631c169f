"""Blockwise attention: merge the outputs of key blocks by their log-sum-exp; sum the gradients of blocks.

    out = sum_n exp(lse_n - lse) out_n,    lse = log sum_n exp(lse_n)       (Milakov and Gimelshein 2018)

Accumulators are fp32 (fp64 for fp64 inputs) with the shapes of the local queries, keys and values.

Legend: s sequence (local), b batch, a query heads, g key/value groups, d head dim; t tokens of packed documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.attention.context_parallel.exchange import NeighbourExchange
from megatron.core.attention.kernels.base import FlashKernel, Kernel
from megatron.core.attention.packing import Segments, group_tiles, segments
from megatron.core.attention.sink import with_sink
from megatron.core.attention.tiles import Tile
from megatron.core.fusions.merge_attention import merge_attention_
from megatron.core.fusions.sum_parts import sum_parts


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(x: Tensor) -> Tensor:
    """View [s, b, a, ...] as [b, a, s, ...]."""
    return x.movedim(0, 2)


def _tokens(x: Tensor) -> Tensor:
    """Flatten [s, b, a, ...] to [s * b, a, ...]; a view if ``x`` is contiguous, which in-place callers need."""
    return x.flatten(0, 1)


def _rows(tile: Tile) -> slice:
    return slice(None) if tile.row is None else slice(tile.row, tile.row + 1)


def _at_queries(x: Tensor, tile: Tile) -> Tensor:
    return _heads_first(x)[_rows(tile), :, tile.query : tile.query + tile.num_queries]


def _at_keys(x: Tensor, tile: Tile) -> Tensor:
    return _heads_first(x)[_rows(tile), :, tile.key : tile.key + tile.num_keys]


def _split_tiles(tiles: tuple[Tile, ...], x: Tensor, kernel: Kernel) -> tuple[tuple[Tile, ...], list[Segments]]:
    """Split ``tiles`` of queries ``x`` [s, b, ...] into (tiles for one kernel call each, groups of document tiles for
    variable-length calls). All tiles are in one of the two: only flash kernels have variable-length calls, and only
    tiles of single rows (documents) use them."""
    if not isinstance(kernel, FlashKernel) or not tiles or tiles[0].row is None:
        return tiles, []
    return (), [segments(group, x.shape[1], x.device) for group in group_tiles(tiles)]


class OnlineSoftmax:
    """Attention of local queries [s, b, a, d] over key blocks that are added one at a time (online softmax)."""

    def __init__(self, query: Tensor, kernel: Kernel) -> None:
        self.query, self.kernel = query, kernel
        dtype = accumulator_dtype(query.dtype)
        self.out = torch.empty(query.shape, dtype=dtype, device=query.device)
        self.lse = torch.empty(query.shape[:3], dtype=dtype, device=query.device)
        self._started = False

    def add_block(self, key: Tensor, value: Tensor, tiles: tuple[Tile, ...]) -> None:
        """Attend to one block of keys [s, b, g, d] and values and merge output and log-sum-exp into the accumulators in
        place. ``tiles`` are the visible pairs of the block; none changes nothing. Document tiles of flash kernels run
        in variable-length calls. Not differentiable."""
        single, packed = _split_tiles(tiles, self.query, self.kernel)
        for tile in single:
            out, lse = self.kernel.forward(
                _at_queries(self.query, tile), _at_keys(key, tile), _at_keys(value, tile), tile
            )
            if not self._started and tile.row is None and tile.num_queries == len(self.query):
                _at_queries(self.out, tile).copy_(out)  # covers all queries: saves the zero fill and the merge
                _at_queries(self.lse, tile).copy_(lse)
                self._started = True
                continue
            self._start()
            merge_attention_(_at_queries(self.out, tile), _at_queries(self.lse, tile), out, lse)
        for at in packed:
            self._add_packed(key, value, at)

    def _start(self) -> None:
        """On the first call, set the accumulators to the result of attending to no key."""
        if not self._started:
            self.out.zero_()
            self.lse.fill_(-torch.inf)  # exp(lse) = 0 is the weight of a query that has seen no key
            self._started = True

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output [s, b, a, d] in the queries' dtype and the lse [s, b, a] in fp32 (fp64 for fp64), both
        including ``sink`` [a] if given. Without any block the output is zero and the lse -inf. Call it last: results
        that need no cast or sink are the accumulators."""
        self._start()
        if sink is not None:
            return with_sink(self.out, self.lse, sink, self.query.dtype)
        return self.out.to(self.query.dtype), self.lse

    def _add_packed(self, key: Tensor, value: Tensor, at: Segments) -> None:
        """Attend to the document segments ``at`` in one variable-length kernel call: copy their scattered queries, keys
        and values, run, and merge output and log-sum-exp into the accumulators in place. Requires a flash kernel."""
        assert isinstance(self.kernel, FlashKernel)
        self._start()
        query = _tokens(self.query).index_select(0, at.query_index)
        key, value = (_tokens(x).index_select(0, at.key_index) for x in (key, value))
        out, lse = self.kernel.forward_packed(query, key, value, at)
        total, total_lse = _tokens(self.out), _tokens(self.lse)
        # gather the documents' scattered rows into copies, merge in place, and copy the rows back
        merged, merged_lse = total.index_select(0, at.query_index), total_lse.index_select(0, at.query_index)
        merge_attention_(*(x.transpose(0, 1).unsqueeze(0) for x in (merged, merged_lse, out, lse)))
        total.index_copy_(0, at.query_index, merged)
        total_lse.index_copy_(0, at.query_index, merged_lse)


def _add(total: Tensor, part: Tensor, out: Tensor) -> None:
    """Write ``total`` [s, b, a, d] + ``part`` [b, a, s, d] to ``out`` [s, b, a, d]. Kernels return gradients in the
    memory layout of their inputs, so that the permuted ``part`` is read contiguously."""
    sum_parts(total, part.movedim(2, 0), out)


class GradientSum:
    """Accumulates n gradients [s, b, a, d] of equal shape from the partial gradients of key blocks or tiles. 16-bit
    parts are added in fp32 to a buffer [n, s, b, a, d], or to the tensor that ``arriving`` receives; the first ``add``
    that needs it waits for it. To save passes over memory, elements that the first part writes are not zeroed, and a
    last part that covers all tokens is added by the same kernel that rounds the result."""

    def __init__(self, count: int, like: Tensor, arriving: NeighbourExchange | None = None) -> None:
        """Accumulate ``count`` gradients with the shape, dtype and device of ``like``."""
        self._shape, self._dtype, self._device = (count, *like.shape), like.dtype, like.device
        self._arriving = arriving
        self._total: Tensor | None = None
        self._full_part: Sequence[Tensor] | None = None
        """The last part if it covers all rows and tokens: n tensors [b, a, s, d], kept by reference, not added yet."""

    def add(self, parts: Sequence[Tensor], row: slice, start: int) -> None:
        """Add ``parts``, n tensors [b, a, k, d], to the k tokens from ``start`` of the batch rows ``row``. Parts that
        cover all rows and tokens are only kept by reference until the next call of any method: do not write to them.
        Other parts are added at once; they wait for the arriving tensor."""
        length = self._shape[1]
        if row == slice(None) and parts[0].shape[2] == length:
            self._settle()
            self._full_part = parts
            return
        stop = start + parts[0].shape[2]
        if row == slice(None) and not self._started:
            total = self._new_total()
            total[:, :start].zero_()
            total[:, stop:].zero_()
            for x, part in zip(total, parts, strict=True):
                _heads_first(x)[:, :, start:stop].copy_(part)
            return
        for x, part in zip(self.total(), parts, strict=True):
            _add(x[start:stop, row], part, x[start:stop, row])

    def add_tokens(self, parts: Sequence[Tensor], index: Tensor) -> None:
        """Add ``parts``, n tensors [t, a, d], to tokens ``index`` [t] of the flattened [s * b] in place. An index must
        not occur twice. Waits for the arriving tensor."""
        for x, part in zip(self.total(), parts, strict=True):
            tokens = _tokens(x)
            tokens[index] = tokens[index] + part  # correct only without duplicates in index

    def total(self) -> Tensor:
        """Return the sums so far [n, s, b, a, d] in fp32 (fp64 for fp64): the buffer itself, which later ``add`` calls
        change. Waits for the arriving tensor."""
        self._settle()
        return self._new_total().zero_() if self._total is None else self._total

    def result(self) -> list[Tensor]:
        """Return the n sums as tensors [s, b, a, d] in the gradients' dtype, zeros without parts; they may be views of
        the last parts. Waits (on CUDA: in stream order) for the arriving tensor. Call it once, as the last method."""
        if self._full_part is None:
            return list(self.total().to(self._dtype))
        last, self._full_part = self._full_part, None
        self._settle()
        if self._total is None:
            return [part.movedim(2, 0).to(self._dtype) for part in last]
        result = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for x, so_far, part in zip(result, self._total, last, strict=True):
            _add(so_far, part, x)
        return list(result)

    @property
    def _started(self) -> bool:
        return self._total is not None or self._full_part is not None or self._arriving is not None

    def _new_total(self) -> Tensor:
        self._total = torch.empty(self._shape, dtype=accumulator_dtype(self._dtype), device=self._device)
        return self._total

    def _settle(self) -> None:
        """Wait for the arriving tensor, whose memory becomes the accumulator, and add the deferred part to it, so that
        ``_total`` holds all parts so far. ``_total`` stays None without any part."""
        if self._arriving is not None:
            self._total, self._arriving = self._arriving.wait(), None
        if self._full_part is None:
            return
        last, self._full_part = self._full_part, None
        empty = self._total is None
        total = self._new_total() if self._total is None else self._total
        for x, part in zip(total, last, strict=True):
            if empty:
                _heads_first(x).copy_(part)
            else:
                _add(x, part, x)


class BlockGradients:
    """Backward of :class:`OnlineSoftmax`: accumulates the gradient of local queries over key blocks, in fp32 (fp64 for
    fp64), and adds each block's key and value gradients to the caller's sums. ``out`` and ``lse`` are the merged
    results over all blocks (and the sink), with which per-block gradients are exact."""

    def __init__(self, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, kernel: Kernel) -> None:
        self.kernel = kernel
        self.grad_out, self.query, self.out, self.lse = grad, query, out, lse
        self._grad_query = GradientSum(1, query)
        self.grad_bias: Tensor | None = None
        """Gradient of the kernel's position bias [a, n], summed over the blocks so far; None without a bias."""

    def add_block(self, keys_values: Tensor, tiles: tuple[Tile, ...], sums: GradientSum) -> None:
        """Run the kernel's backward for one block ``keys_values`` [2, s, b, g, d]: add the gradients of keys and values
        to ``sums``, and accumulate the query gradient and, if there is a bias, ``grad_bias`` here. ``tiles`` are the
        block's visible pairs, as in :meth:`OnlineSoftmax.add_block`; without any, nothing is added."""
        key, value = keys_values
        single, packed = _split_tiles(tiles, self.query, self.kernel)
        for tile in single:
            at_queries = [_at_queries(x, tile) for x in (self.grad_out, self.query, self.out, self.lse)]
            grad_query, *grads = self.kernel.backward(
                at_queries[0],
                at_queries[1],
                _at_keys(key, tile),
                _at_keys(value, tile),
                at_queries[2],
                at_queries[3],
                tile,
            )
            self._grad_query.add([grad_query], _rows(tile), tile.query)
            sums.add(grads[:2], _rows(tile), tile.key)
            for of_bias in grads[2:]:
                self.grad_bias = of_bias if self.grad_bias is None else self.grad_bias + of_bias
        for at in packed:
            self._add_packed(keys_values, at, sums)

    def grad_query(self) -> Tensor:
        """Return the query gradient [s, b, a, d] over all blocks, in the queries' dtype."""
        return self._grad_query.result()[0]

    def _add_packed(self, keys_values: Tensor, at: Segments, sums: GradientSum) -> None:
        """Run the backward of the document segments ``at`` in one variable-length kernel call on copies of their
        tokens; add the query gradient to the accumulator and the key and value gradients to ``sums``. Requires a flash
        kernel."""
        assert isinstance(self.kernel, FlashKernel)
        grad, query, out, lse = (
            _tokens(x).index_select(0, at.query_index) for x in (self.grad_out, self.query, self.out, self.lse)
        )
        key, value = (_tokens(x).index_select(0, at.key_index) for x in keys_values)
        grad_query, *grads = self.kernel.backward_packed(grad, query, key, value, out, lse, at)
        self._grad_query.add_tokens([grad_query], at.query_index)
        sums.add_tokens(grads, at.key_index)
