"""Causal attention whose output for a token depends on that token and its keys only: the same bits in every batch, for
training, prefill and decoding, and for contiguous and paged keys.

    out = softmax(softcap(scale q K^T), over the visible keys of the token's sequence and the sink) V

Each sequence's keys are read in blocks of fixed size that count from position 0, in ascending order, with an online
softmax. A block without visible keys changes no bit: sums are rescaled by 2^(old - new exponent), which is exactly 1
where the maximum stays (computed as 2^(x unit - round(x unit)) it is not: rows would depend on the tile's other rows).
There is no split over keys: decoding one long sequence uses as many programs as there are key/value heads. Queries of a
sequence may be any consecutive positions. Products and sums that a compiler could fuse are written as fused, so that
blocks with and without a mask have the same roundings.

Legend: n query rows, m key rows, a query heads, g key/value heads, p query heads per group, d and e head dims of keys
and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.batch_invariant_product import ROWS, accumulator_dtype
from megatron.core.fusions.installed_triton import tl, triton

_UNLIMITED = 2**30
_KEYS, _FEW_ROWS, _MANY_ROWS = 64, 64, 128
"""Keys and query rows (tokens x heads of a group) of a GPU tile. The number of rows changes no bit."""


class Span(NamedTuple):
    """Consecutive tokens of one sequence among the query rows."""

    row: int
    """First query row."""
    num_tokens: int
    position: int
    """Position of the first token in its sequence."""
    first_key: int
    """Index in ``key_rows`` of position 0 of the sequence."""


class Scores(NamedTuple):
    """Definition of attention scores."""

    scale: float
    left: int | None = None
    """Number of earlier positions that a token sees; None: all."""
    soft_cap: float | None = None
    sink: Tensor | None = None
    """Logits [a] in the softmax denominator."""


def attention_plain(
    query: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor | None, spans: Sequence[Span], scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return :func:`batch_invariant_attention` in torch operations on blocks of fixed shape."""
    dtype, groups = accumulator_dtype(query.dtype), keys.shape[1]
    out = query.new_zeros((*query.shape[:2], values.shape[2]), dtype=dtype)
    lse = query.new_zeros(query.shape[:2], dtype=dtype)
    per_group = query.shape[1] // groups
    for span in spans:
        rows = slice(span.row, span.row + span.num_tokens)
        places = slice(span.first_key, span.first_key + span.position + span.num_tokens)
        key_places = places if key_rows is None else key_rows[places]
        grouped = query[rows].to(dtype).unflatten(1, (groups, per_group))
        position = torch.arange(span.position, span.position + span.num_tokens).repeat_interleave(per_group)
        sink = None if scores.sink is None else scores.sink.to(dtype).view(groups, per_group)
        for group in range(groups):
            key, value = (x[key_places, group].to(dtype) for x in (keys, values))
            start = None if sink is None else sink[group].repeat(span.num_tokens)
            output, total = _sequence(grouped[:, group].flatten(0, 1), key, value, position, start, scores)
            heads = slice(group * per_group, (group + 1) * per_group)
            out[rows, heads] = output[:, : values.shape[2]].unflatten(0, (-1, per_group))
            lse[rows, heads] = total.view(-1, per_group)
    return out.to(query.dtype), lse


def _sequence(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, sink: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return output [r, at least e] and log-sum-exp [r] of one sequence and group; ``position`` [r] ascends."""
    padding, wide = -len(query) % ROWS, -(-max(key.shape[1], value.shape[1]) // ROWS) * ROWS
    position = F.pad(position, (0, padding), value=-1)
    # one width for both products, whether or not the caller has padded heads: GEMMs choose by it
    query, key, value = (F.pad(x, (0, wide - x.shape[1], 0, -len(x) % ROWS)) for x in (query, key, value))
    largest = query.new_full((len(query),), -torch.inf)
    if sink is not None:
        largest[: len(sink)] = sink
    total = torch.zeros_like(largest) if sink is None else torch.ones_like(largest)
    out = query.new_zeros((len(query), value.shape[1]))
    for block in range(0, len(query), ROWS):
        rows = slice(block, block + ROWS)
        out[rows], total[rows], largest[rows] = _row_block(
            query[rows], key, value, position[rows], largest[rows], total[rows], scores
        )
    return (out / total.unsqueeze(1))[: len(query) - padding], (largest + total.log())[: len(query) - padding]


def _row_block(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, largest: Tensor, total: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    out = query.new_zeros((ROWS, value.shape[1]))
    for start in range(0, int(position.max()) + 1, ROWS):
        logits = torch.mm(query.clone(), key[start : start + ROWS].clone().t()) * scores.scale
        if scores.soft_cap is not None:
            logits = torch.tanh(logits / scores.soft_cap) * scores.soft_cap
        distance = position.unsqueeze(1) - torch.arange(start, start + ROWS)
        hidden = distance < 0
        if scores.left is not None:
            hidden |= distance > scores.left
        logits = logits.masked_fill(hidden.to(logits.device), -torch.inf)
        maximum = torch.maximum(largest, logits.amax(1))
        shift = maximum.clamp(min=torch.finfo(maximum.dtype).min)  # no key yet: -inf - -inf would be NaN
        weights, shrink = (logits - shift.unsqueeze(1)).exp(), (largest - shift).exp()
        out = out * shrink.unsqueeze(1) + torch.mm(weights, value[start : start + ROWS].clone())
        total, largest = total * shrink + weights.sum(1), maximum
    return out, total, largest


if triton is not None:

    @triton.jit
    def _attend_blocks(
        q, keys, values, key_rows, first_key, group, position, begin, end, stop, left, scale, cap, unit,
        key_m, key_g, value_m, value_g, shift, total, out,
        KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr,
        MASKED: tl.constexpr, CONSECUTIVE: tl.constexpr,
    ):  # fmt: skip
        """Update the largest exponent of 2 (``shift``), and sums relative to it. MASKED: rows may not see all keys."""
        channel = tl.arange(0, PADDED)
        for start in range(begin, end, KEYS):
            place = start + tl.arange(0, KEYS)
            present = place < stop
            if CONSECUTIVE:
                key_row = (first_key + place).to(tl.int64)
            else:
                key_row = tl.load(key_rows + first_key + place, mask=present, other=0).to(tl.int64)
            at_key = keys + key_row[None, :] * key_m + group * key_g + channel[:, None]
            at_value = values + key_row[:, None] * value_m + group * value_g + channel[None, :]
            if MASKED or D != PADDED or E != PADDED:
                k = tl.load(at_key, mask=present[None, :] & (channel < D)[:, None], other=0.0)
                v = tl.load(at_value, mask=present[:, None] & (channel < E)[None, :], other=0.0)
            else:
                k = tl.load(at_key)
                v = tl.load(at_value)
            scores = tl.dot(q, k, input_precision="ieee")
            if CAPPED:
                scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * (scores * scale) / cap)) - 1.0)
            if MASKED:
                distance = position[:, None] - place[None, :]
                scores = tl.where((distance >= 0) & (distance <= left), scores, float("-inf"))
            maximum = tl.maximum(shift, tl.max(scores, 1) * unit)
            weights = tl.math.exp2(
                tl.fma(scores, tl.zeros_like(scores) + unit, tl.zeros_like(scores) - maximum[:, None])
            )
            shrink = tl.math.exp2(shift - maximum)
            out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
            total = tl.fma(total, shrink, tl.sum(weights, 1))
            shift = maximum
        return shift, total, out

    @triton.jit
    def _attention_kernel(
        query, keys, values, key_rows, blocks, sinks, outs, lses, scale, cap, unit, left,
        query_n, query_a, key_m, key_g, value_m, value_g, heads,
        HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
        PADDED: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr, CONSECUTIVE: tl.constexpr,
    ):  # fmt: skip
        """Attend the HEADS heads of one group, for the tokens of one of ``blocks`` [., 4] (row, count, position, first
        key), with a count of at most ROWS // HEADS. Writes outs [n, a, E] and lses [n, a] fp32."""
        # the last blocks of a sequence have the most keys: they start first
        block, group = blocks + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4, tl.program_id(1)
        first_row, count = tl.load(block), tl.load(block + 1)
        first, first_key = tl.load(block + 2).to(tl.int32), tl.load(block + 3)
        lane, channel = tl.arange(0, ROWS), tl.arange(0, PADDED)
        token, head = lane // HEADS, group * HEADS + lane % HEADS
        inside = token < count
        position = first + token
        row = first_row + token
        at_query = query + row[:, None] * query_n + head[:, None] * query_a + channel[None, :]
        q = tl.load(at_query, mask=inside[:, None] & (channel < D)[None, :], other=0.0)
        shift = tl.full((ROWS,), -1.0e30, tl.float32)  # no key yet; finite, since -inf - -inf would be NaN
        total = tl.zeros((ROWS,), tl.float32)
        if SINK:
            sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
            shift = tl.fma(sink, tl.zeros_like(sink) + 1.4426950408889634, tl.zeros_like(sink))
            total += 1.0
        out = tl.zeros((ROWS, PADDED), tl.float32)
        stop = first + count.to(tl.int32)
        # blocks between ``low`` and ``high`` are visible to every row
        begin = tl.maximum(first - left, 0) // KEYS * KEYS
        low = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(stop - 1 - left, 0), KEYS) * KEYS, begin), stop)
        high = tl.maximum((first + 1) // KEYS * KEYS, low)
        shift, total, out = _attend_blocks(
            q, keys, values, key_rows, first_key, group, position, begin, low, stop, left, scale, cap, unit,
            key_m, key_g, value_m, value_g, shift, total, out, KEYS, D, E, PADDED, CAPPED, True, CONSECUTIVE,
        )  # fmt: skip
        shift, total, out = _attend_blocks(
            q, keys, values, key_rows, first_key, group, position, low, high, stop, left, scale, cap, unit,
            key_m, key_g, value_m, value_g, shift, total, out, KEYS, D, E, PADDED, CAPPED, False, CONSECUTIVE,
        )  # fmt: skip
        shift, total, out = _attend_blocks(
            q, keys, values, key_rows, first_key, group, position, high, stop, stop, left, scale, cap, unit,
            key_m, key_g, value_m, value_g, shift, total, out, KEYS, D, E, PADDED, CAPPED, True, CONSECUTIVE,
        )  # fmt: skip
        at_out = outs + (row * heads + head)[:, None] * E + channel[None, :]
        result = (out / total[:, None]).to(outs.dtype.element_ty)
        tl.store(at_out, result, mask=inside[:, None] & (channel < E)[None, :])
        lse = tl.fma(shift, tl.zeros_like(shift) + 0.6931471805599453, tl.log(total))
        tl.store(lses + row * heads + head, lse, mask=inside)


@lru_cache(maxsize=4)  # the layers of a step have the same
def _blocks(spans: tuple[Span, ...], most: int, device: torch.device) -> Tensor:
    """Return (row, tokens, position, first key) of programs with at most ``most`` tokens, int64 [., 4]."""
    cut = [
        (span.row + offset, min(most, span.num_tokens - offset), span.position + offset, span.first_key)
        for span in spans
        for offset in range(0, span.num_tokens, most)
    ]
    return torch.tensor(cut, dtype=torch.int64).to(device, non_blocking=True)


def attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor | None, spans: Sequence[Span], scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return :func:`batch_invariant_attention` by one kernel with fixed tiles of keys."""
    (num, heads, width), groups, out_width = query.shape, keys.shape[1], values.shape[2]
    per_group, padded = heads // groups, triton.next_power_of_2(max(width, out_width, 16))
    many = max(span.num_tokens for span in spans) * per_group > _FEW_ROWS and padded <= 128
    wide = many and query.dtype.itemsize == 2
    rows = max(_MANY_ROWS if wide else _FEW_ROWS, triton.next_power_of_2(per_group))
    blocks = _blocks(tuple(spans), rows // per_group, query.device)
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    outs = query.new_zeros((num, heads, out_width))
    lses = torch.zeros((num, heads), dtype=torch.float32, device=query.device)
    capped = scores.soft_cap is not None
    unit = (1.0 if capped else scores.scale) / math.log(2)
    _attention_kernel[(len(blocks), groups)](
        query, keys, values, key_rows, blocks, scores.sink, outs, lses, scores.scale, scores.soft_cap or 1.0,
        unit, _UNLIMITED if scores.left is None else scores.left,
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], heads,
        HEADS=per_group, ROWS=rows, KEYS=_KEYS, D=width, E=out_width, PADDED=padded, CAPPED=capped,
        SINK=scores.sink is not None, CONSECUTIVE=key_rows is None, num_warps=8 if wide else 4, num_stages=3,
    )  # fmt: skip
    return outs, lses


def batch_invariant_attention(
    query: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor | None, spans: Sequence[Span], scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return the attention [n, a, e] of ``query`` [n, a, d], in its dtype, and the log-sum-exp [n, a] in fp32 (fp64 for
    fp64), both including the sink; zeros for rows outside of all ``spans``. Not differentiable.

    Args:
        keys, values: [m, g, d] and [m, g, e].
        key_rows: row of ``keys`` of each position of each sequence, int64, one sequence after another. None: the keys
            themselves are in this order."""
    if not spans:
        return query.new_zeros((*query.shape[:2], values.shape[2])), query.new_zeros(query.shape[:2]).float()
    kernel = query.is_cuda and query.dtype != torch.float64
    return (attention_triton if kernel else attention_plain)(query, keys, values, key_rows, spans, scores)
