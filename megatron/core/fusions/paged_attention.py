"""Attention of single tokens to a paged cache of keys and values, in Triton: decoding.

    out = softmax(softcap(scale q K^T), over the visible keys of the token's sequence and the sink) V

The keys of a token are cut into splits of SPLIT positions. Programs take the splits of all tokens round-robin, one
group of heads each: a program reads the keys of a split once for all query heads of the group and writes a partial
output with its log-sum-exp; a second kernel merges a token's splits in ascending order. Splits have a fixed size and
start at position 0, so that the bits of a token depend on its position only, not on the batch. The number of splits is
read on the device, so that a CUDA graph serves all lengths.

Keys of latent attention are ``[value, key]``: the values, which are latents, then channels that are keys only. A
program reads both once, for a block of query heads.

Legend: n tokens, a query heads, g key/value heads, d and e head dims of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.fusions.dispatch import num_sms
from megatron.core.fusions.installed_triton import tl, triton

SPLIT = 256
"""Positions of a split."""
_MERGED = 16
"""Splits that the second kernel reads at once."""
_NUM_WARPS, _NUM_STAGES = 2, 2
"""On an H200, 256 sequences of 2,122 positions with 8 groups of 4 heads of 128 channels take 0.60 ms, or 3.7 TB/s; 4
warps with 3 stages take 0.91 ms."""
_PROGRAMS_PER_SM, _MAX_PROGRAMS_PER_SM = 4, 8
"""Programs of long and of short steps: up to the maximum, all splits are read at once."""
_WIDE = 256
"""Values with more channels take twice the warps and at most 32 query heads per program (4 bytes: 16, and smaller
tiles): accumulator and tiles of 512 channels then fit into the registers and the shared memory of an SM."""
_UNLIMITED = 2**30


class PagedRows(NamedTuple):
    """Tokens and the pages of their sequences; integers on the device."""

    tables: Tensor
    """Pages of each sequence, [sequences, pages]."""
    sequences: Tensor
    """Row of ``tables`` of each token, [n]."""
    positions: Tensor
    """Position of each token, [n]."""
    splits: Tensor
    """Token of each split, ascending; entries after the last split are not read."""
    first_splits: Tensor
    """Index of each token's first split, and the number of splits, [n + 1]."""


def split_tokens(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``splits`` and ``first_splits`` of :class:`PagedRows`, int64, for tokens at ``positions`` [n]."""
    counts = positions // SPLIT + 1
    first = np.zeros(len(positions) + 1, dtype=np.int64)
    np.cumsum(counts, out=first[1:])
    return np.repeat(np.arange(len(positions)), counts), first


if triton is not None:

    @triton.jit
    def _split_kernel(
        query, keys, values, tables, sequences, positions, splits, first_splits, outs, lses, scale, cap, left, num_rows,
        table_s, query_n, query_a, key_page, key_slot, key_g, value_page, value_slot, value_g,
        PAGE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
        BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
        CAPPED: tl.constexpr, VALUES_IN_KEYS: tl.constexpr,
    ):  # fmt: skip
        """Attend to every num_programs(0)-th split. Writes fp32; nothing for splits without a visible key."""
        group = tl.program_id(1) % GROUPS
        head, d, e = tl.arange(0, BLOCK), tl.arange(0, PADDED_D), tl.arange(0, PADDED_E)
        head += tl.program_id(1) // GROUPS * BLOCK
        inside = head < HEADS
        for split in range(tl.program_id(0), tl.load(first_splits + num_rows).to(tl.int32), tl.num_programs(0)):
            row = tl.load(splits + split).to(tl.int64)
            position = tl.load(positions + row).to(tl.int32)
            first = tl.maximum(position - left, 0)
            start = (split - tl.load(first_splits + row).to(tl.int32)) * SPLIT
            stop = tl.minimum(start + SPLIT, position + 1)
            # tiles count from the split's start: a window must not change the order of sums of the positions in it
            begin = start + tl.maximum(first - start, 0) // TILE * TILE
            if stop > begin:
                largest = tl.full((BLOCK,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK,), tl.float32)
                out = tl.zeros((BLOCK, PADDED_E), tl.float32)
                at_query = query + row * query_n + (group * HEADS + head)[:, None] * query_a
                if VALUES_IN_KEYS:
                    q_value = tl.load(at_query + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
                    at_query += E
                q = tl.load(at_query + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
                table = tables + tl.load(sequences + row) * table_s
                for tile in range(begin, stop, TILE):
                    place = tile + tl.arange(0, TILE)
                    visible = (place < stop) & (place >= first)
                    page = tl.load(table + place // PAGE, mask=visible, other=0).to(tl.int64)
                    slot = place % PAGE
                    at_key = keys + (page * key_page + slot * key_slot + group * key_g)[:, None] + d[None, :]
                    k = tl.load(at_key, mask=visible[:, None] & (d < D)[None, :], other=0.0)
                    at_value = values + (page * value_page + slot * value_slot + group * value_g)[:, None] + e[None, :]
                    v = tl.load(at_value, mask=visible[:, None] & (e < E)[None, :], other=0.0)
                    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                    if VALUES_IN_KEYS:
                        scores += tl.dot(q_value, tl.trans(v), input_precision="ieee")
                    scores *= scale
                    if CAPPED:
                        scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / cap)) - 1.0)
                    scores = tl.where(visible[None, :], scores, float("-inf"))
                    new = tl.maximum(largest, tl.max(scores, 1))
                    weights = tl.exp(scores - new[:, None])
                    shrink = tl.exp(largest - new)
                    out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                    total = total * shrink + tl.sum(weights, 1)
                    largest = new
                result = (split * GROUPS + group) * HEADS + head.to(tl.int64)
                at_out = outs + result[:, None] * E + e[None, :]
                tl.store(at_out, out / total[:, None], mask=inside[:, None] & (e < E)[None, :])
                tl.store(lses + result, largest + tl.log(total), mask=inside)

    @triton.jit
    def _merge_kernel(
        outs, lses, positions, first_splits, sinks, merged, heads, left,
        SPLIT: tl.constexpr, MERGED: tl.constexpr, E: tl.constexpr, PADDED_E: tl.constexpr, SINK: tl.constexpr,
    ):  # fmt: skip
        """Merge the splits of one token and head, in ascending order, and add the sink."""
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        position = tl.load(positions + row).to(tl.int32)
        offset = tl.load(first_splits + row).to(tl.int64)
        e = tl.arange(0, PADDED_E)
        largest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
        if SINK:
            largest, total = tl.load(sinks + head).to(tl.float32), total + 1.0
        out = tl.zeros((PADDED_E,), tl.float32)
        first, last = tl.maximum(position - left, 0) // SPLIT, position // SPLIT
        # blocks count from split 0: a window must not change which splits are added first
        for begin in range(first // MERGED * MERGED, last + 1, MERGED):
            split = begin + tl.arange(0, MERGED)
            used = (split >= first) & (split <= last)
            at = (offset + split) * heads + head
            lse = tl.load(lses + at, mask=used, other=float("-inf"))
            new = tl.maximum(largest, tl.max(lse, 0))
            weights, shrink = tl.exp(lse - new), tl.exp(largest - new)
            parts = tl.load(outs + at[:, None] * E + e[None, :], mask=used[:, None] & (e < E)[None, :], other=0.0)
            out = out * shrink + tl.sum(weights[:, None] * parts, 0)
            total = total * shrink + tl.sum(weights, 0)
            largest = new
        at_merged = merged + (row * heads + head) * E + e
        tl.store(at_merged, (out / total).to(merged.dtype.element_ty), mask=e < E)

    @triton.jit
    def _write_kernel(
        key, value, keys, values, slots, key_n, key_g, value_n, value_g,
        D: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(slots + row).to(tl.int64)
        in_key, in_value = channel < KEYS, channel < VALUES
        x = tl.load(key + row * key_n + channel // D * key_g + channel % D, mask=in_key)
        y = tl.load(value + row * value_n + channel // E * value_g + channel % E, mask=in_value)
        tl.store(keys + slot * KEYS + channel, x, mask=in_key)
        tl.store(values + slot * VALUES + channel, y, mask=in_value)


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
    """Return the attention [n, a, e] of ``query`` [n, a, d] to the cached positions up to each token's. Queries of
    e + d channels attend to the keys [values, ``keys``].

    Args:
        keys, values: pages [pages, page size, g, d] and [pages, page size, g, e] with contiguous last dims; they hold
            the tokens themselves, too.
        left: number of earlier positions that a token sees; None: all.
        sink: logits [a] in the softmax denominator."""
    (num, heads, query_width), (groups, width), out_width = query.shape, keys.shape[2:], values.shape[3]
    per_group, num_splits = heads // groups, len(rows.splits)
    outs = torch.empty((num_splits, heads, out_width), dtype=torch.float32, device=query.device)
    lses = torch.empty((num_splits, heads), dtype=torch.float32, device=query.device)
    merged = query.new_empty((num, heads, out_width))
    left = _UNLIMITED if left is None else left
    padded_out = triton.next_power_of_2(max(out_width, 16))
    is_wide, is_4_bytes = padded_out > _WIDE, query.element_size() > 2
    block = triton.next_power_of_2(max(per_group, 16))
    if is_wide:
        block = min(block, 16 if is_4_bytes else 32)
    blocks = groups * triton.cdiv(per_group, block)
    tile, sms = 32 if is_wide and is_4_bytes else 64, num_sms(query.device)
    programs = num_splits
    if programs * blocks > _MAX_PROGRAMS_PER_SM * sms:
        programs = triton.cdiv(_PROGRAMS_PER_SM * sms, blocks)
    _split_kernel[(programs, blocks)](
        query, keys, values, rows.tables, rows.sequences, rows.positions, rows.splits, rows.first_splits, outs, lses,
        scale, soft_cap or 1.0, left, num, rows.tables.stride(0), *query.stride()[:2], *keys.stride()[:3],
        *values.stride()[:3],
        PAGE=keys.shape[1], SPLIT=SPLIT, TILE=tile, HEADS=per_group, GROUPS=groups, BLOCK=block,
        D=width, E=out_width, PADDED_D=triton.next_power_of_2(max(width, 16)), PADDED_E=padded_out,
        CAPPED=soft_cap is not None, VALUES_IN_KEYS=query_width > width, num_warps=_NUM_WARPS * (2 if is_wide else 1),
        num_stages=_NUM_STAGES,
    )  # fmt: skip
    _merge_kernel[(num, heads)](
        outs, lses, rows.positions, rows.first_splits, sink, merged, heads, left, SPLIT=SPLIT, MERGED=_MERGED,
        E=out_width, PADDED_E=padded_out, SINK=sink is not None,
    )  # fmt: skip
    return merged


def write_pages(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write ``key`` [n, g, d] and ``value`` [n, g, e], with contiguous last dims, to the entries ``slots`` [n] of the
    contiguous pages [pages, page size, g, d] and [pages, page size, g, e]. Equal slots get one of their rows."""
    (num, groups, width), out_width = key.shape, value.shape[2]
    block = min(1024, triton.next_power_of_2(groups * max(width, out_width)))
    _write_kernel[(num, triton.cdiv(groups * max(width, out_width), block))](
        key, value, keys, values, slots, *key.stride()[:2], *value.stride()[:2],
        D=width, E=out_width, KEYS=groups * width, VALUES=groups * out_width, BLOCK=block,
    )  # fmt: skip
