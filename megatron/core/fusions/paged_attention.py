"""Attention of single tokens to a paged cache of keys and values, in Triton: decoding.

    out = softmax(softcap(scale q K^T), over the visible keys of the token's sequence and the sink) V

One program per (token, key/value head, split) reads the keys of SPLIT positions once for all query heads of the group
and writes a partial output with its log-sum-exp; a second kernel merges the splits in ascending order. Splits have a
fixed size and start at position 0, so that the bits of a token depend on its position only, not on the batch.

Legend: n tokens, a query heads, g key/value heads, d and e head dims of keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

SPLIT = 256
"""Positions of a split."""
_TILE = 64
_UNLIMITED = 2**30


class PagedRows(NamedTuple):
    """Tokens and the pages of their sequences."""

    tables: Tensor
    """Pages of each sequence, integers [sequences, pages]."""
    sequences: Tensor
    """Row of ``tables`` of each token, [n]."""
    positions: Tensor
    """Position of each token, int64 [n]."""
    num_keys: int
    """Upper bound of the positions, exclusive."""


if triton is not None:

    @triton.jit
    def _split_kernel(
        query, keys, values, tables, sequences, positions, outs, lses, scale, cap, left, num_splits,
        table_s, query_n, query_a, key_page, key_slot, key_g, value_page, value_slot, value_g,
        PAGE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
        D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, CAPPED: tl.constexpr,
    ):  # fmt: skip
        """Attend the HEADS query heads of one token and one group to the positions of one split. Writes outs [n, a,
        splits, E] and lses [n, a, splits] in fp32; splits without a visible key get lse -inf and no output."""
        row, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        position = tl.load(positions + row).to(tl.int32)
        head, d, e = tl.arange(0, PADDED), tl.arange(0, PADDED_D), tl.arange(0, PADDED_E)
        inside = head < HEADS
        result = (row * tl.num_programs(1) * HEADS + group * HEADS + head) * num_splits + split
        first = tl.maximum(position - left, 0)
        start = split * SPLIT
        stop = tl.minimum(start + SPLIT, position + 1)
        largest = tl.full((PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        out = tl.zeros((PADDED, PADDED_E), tl.float32)
        # tiles count from the split's start: a window must not change the order of sums of the positions in it
        begin = start + tl.maximum(first - start, 0) // TILE * TILE
        at_query = query + row * query_n + (group * HEADS + head)[:, None] * query_a + d[None, :]
        q = tl.load(at_query, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        table = tables + tl.load(sequences + row) * table_s
        for tile in range(begin, stop, TILE):
            place = tile + tl.arange(0, TILE)
            visible = (place < stop) & (place >= first)
            page = tl.load(table + place // PAGE, mask=visible, other=0).to(tl.int64)
            slot = place % PAGE
            at_key = keys + (page * key_page + slot * key_slot + group * key_g)[:, None] + d[None, :]
            k = tl.load(at_key, mask=visible[:, None] & (d < D)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / cap)) - 1.0)
            scores = tl.where(visible[None, :], scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - new[:, None])
            shrink = tl.exp(largest - new)
            at_value = values + (page * value_page + slot * value_slot + group * value_g)[:, None] + e[None, :]
            v = tl.load(at_value, mask=visible[:, None] & (e < E)[None, :], other=0.0)
            out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            largest = new
        if stop > begin:
            at_out = outs + result[:, None] * E + e[None, :]
            tl.store(at_out, out / total[:, None], mask=inside[:, None] & (e < E)[None, :])
            largest += tl.log(total)
        tl.store(lses + result, largest, mask=inside)

    @triton.jit
    def _merge_kernel(
        outs, lses, positions, sinks, merged, heads, num_splits, left,
        SPLIT: tl.constexpr, E: tl.constexpr, PADDED_E: tl.constexpr, SINK: tl.constexpr,
    ):  # fmt: skip
        """Merge the splits of one token and head, in ascending order, and add the sink; write merged [n, a, E]."""
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        position = tl.load(positions + row).to(tl.int32)
        e = tl.arange(0, PADDED_E)
        largest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
        if SINK:
            largest, total = tl.load(sinks + head).to(tl.float32), total + 1.0
        out = tl.zeros((PADDED_E,), tl.float32)
        for split in range(tl.maximum(position - left, 0) // SPLIT, position // SPLIT + 1):
            at = (row * heads + head) * num_splits + split
            lse = tl.load(lses + at)
            new = tl.maximum(largest, lse)
            weight, shrink = tl.exp(lse - new), tl.exp(largest - new)
            out = out * shrink + weight * tl.load(outs + at * E + e, mask=e < E, other=0.0)
            total = total * shrink + weight
            largest = new
        at_merged = merged + (row * heads + head) * E + e
        tl.store(at_merged, (out / total).to(merged.dtype.element_ty), mask=e < E)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    left: int | None = None,
    soft_cap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return the attention [n, a, e] of ``query`` [n, a, d] to the cached positions up to each token's.

    Args:
        keys, values: pages [pages, page size, g, d] and [pages, page size, g, e] with contiguous last dims; they hold
            the tokens themselves, too.
        left: number of earlier positions that a token sees; None: all.
        sink: logits [a] in the softmax denominator.
    """
    (num, heads, width), groups, out_width = query.shape, keys.shape[2], values.shape[3]
    per_group, splits = heads // groups, triton.cdiv(rows.num_keys, SPLIT)
    outs = torch.empty((num, heads, splits, out_width), dtype=torch.float32, device=query.device)
    lses = torch.empty((num, heads, splits), dtype=torch.float32, device=query.device)
    merged = query.new_empty((num, heads, out_width))
    left = _UNLIMITED if left is None else left
    padded_out = triton.next_power_of_2(max(out_width, 16))
    _split_kernel[(num, groups, splits)](
        query, keys, values, rows.tables, rows.sequences, rows.positions, outs, lses, scale, soft_cap or 1.0, left,
        splits, rows.tables.stride(0), *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        PAGE=keys.shape[1], SPLIT=SPLIT, TILE=_TILE, HEADS=per_group,
        PADDED=triton.next_power_of_2(max(per_group, 16)), D=width, E=out_width,
        PADDED_D=triton.next_power_of_2(max(width, 16)), PADDED_E=padded_out, CAPPED=soft_cap is not None,
    )  # fmt: skip
    _merge_kernel[(num, heads)](
        outs, lses, rows.positions, sink, merged, heads, splits, left, SPLIT=SPLIT, E=out_width, PADDED_E=padded_out,
        SINK=sink is not None,
    )  # fmt: skip
    return merged
