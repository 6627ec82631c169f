"""Causal attention whose output for a token depends on that token and its keys only: the same bits in every batch, for
training, prefill and decoding, and for contiguous and paged keys.

    out = softmax(softcap(scale q K^T), over the visible keys of the token's sequence and the sink) V

Each sequence's keys are read in blocks of fixed size that count from position 0, in ascending order, with an online
softmax; a block without visible keys changes no bit. There is no split over keys: decoding one long sequence uses as
many programs as there are key/value heads. Queries of a sequence may be any consecutive positions.

Legend: n query rows, m key rows, a query heads, g key/value heads, p query heads per group, d and e head dims of keys
and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.batch_invariant_product import ROWS, accumulator_dtype
from megatron.core.fusions.installed_triton import tl, triton

_UNLIMITED = 2**30
_QUERY_ROWS, _KEYS = 64, 64
"""Query rows (tokens x heads of a group) and keys of a GPU tile."""


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
    query: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor, spans: Sequence[Span], scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return :func:`batch_invariant_attention` in torch operations on blocks of fixed shape."""
    dtype, groups = accumulator_dtype(query.dtype), keys.shape[1]
    out = query.new_zeros((*query.shape[:2], values.shape[2]), dtype=dtype)
    lse = query.new_zeros(query.shape[:2], dtype=dtype)
    per_group = query.shape[1] // groups
    for span in spans:
        rows = slice(span.row, span.row + span.num_tokens)
        places = key_rows[span.first_key : span.first_key + span.position + span.num_tokens]
        grouped = query[rows].to(dtype).unflatten(1, (groups, per_group))
        position = torch.arange(span.position, span.position + span.num_tokens).repeat_interleave(per_group)
        sink = None if scores.sink is None else scores.sink.to(dtype).view(groups, per_group)
        for group in range(groups):
            key, value = (x[places, group].to(dtype) for x in (keys, values))
            start = None if sink is None else sink[group].repeat(span.num_tokens)
            found, total = _sequence(grouped[:, group].flatten(0, 1), key, value, position, start, scores)
            heads = slice(group * per_group, (group + 1) * per_group)
            out[rows, heads] = found[:, : values.shape[2]].unflatten(0, (-1, per_group))
            lse[rows, heads] = total.view(-1, per_group)
    return out.to(query.dtype), lse


def _sequence(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, sink: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return output [r, at least e] and log-sum-exp [r] of rows ``query`` [r, d] at ascending ``position`` [r] of one
    sequence and group, for ``key`` [k, d] and ``value`` [k, e] from position 0 on."""
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
        logits = logits.masked_fill(hidden, -torch.inf)
        following = torch.maximum(largest, logits.amax(1))
        shift = following.clamp(min=torch.finfo(following.dtype).min)  # no key yet: -inf - -inf would be NaN
        weights, shrink = (logits - shift.unsqueeze(1)).exp(), (largest - shift).exp()
        out = out * shrink.unsqueeze(1) + torch.mm(weights, value[start : start + ROWS].clone())
        total, largest = total * shrink + weights.sum(1), following
    return out, total, largest


if triton is not None:

    @triton.jit
    def _attention_kernel(
        query, keys, values, key_rows, blocks, sinks, outs, lses, scale, cap, left,
        query_n, query_a, key_m, key_g, value_m, value_g, heads,
        HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
        PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr,
    ):  # fmt: skip
        """Attend the HEADS heads of one group, for the tokens of one of ``blocks`` [., 4] (row, count, position, first
        key), at most ROWS // HEADS of them. Writes outs [n, a, E] and lses [n, a] fp32."""
        block, group = blocks + tl.program_id(0) * 4, tl.program_id(1)
        first_row, count = tl.load(block), tl.load(block + 1)
        first, first_key = tl.load(block + 2).to(tl.int32), tl.load(block + 3)
        lane, d, e = tl.arange(0, ROWS), tl.arange(0, PADDED_D), tl.arange(0, PADDED_E)
        token, head = lane // HEADS, group * HEADS + lane % HEADS
        inside = token < count
        position = first + token
        row = first_row + token
        at_query = query + row[:, None] * query_n + head[:, None] * query_a + d[None, :]
        q = tl.load(at_query, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if SINK:
            largest = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
            total += 1.0
        out = tl.zeros((ROWS, PADDED_E), tl.float32)
        stop = first + count.to(tl.int32)
        begin = tl.maximum(first - left, 0) // KEYS * KEYS
        for start in range(begin, stop, KEYS):
            place = start + tl.arange(0, KEYS)
            present = place < stop
            key_row = tl.load(key_rows + first_key + place, mask=present, other=0).to(tl.int64)
            at_key = keys + key_row[:, None] * key_m + group * key_g + d[None, :]
            k = tl.load(at_key, mask=present[:, None] & (d < D)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / cap)) - 1.0)
            distance = position[:, None] - place[None, :]
            scores = tl.where((distance >= 0) & (distance <= left), scores, float("-inf"))
            following = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.maximum(following, -3.0e38)  # no key yet: -inf - -inf would be NaN
            weights = tl.exp(scores - shift[:, None])
            shrink = tl.exp(largest - shift)
            at_value = values + key_row[:, None] * value_m + group * value_g + e[None, :]
            v = tl.load(at_value, mask=present[:, None] & (e < E)[None, :], other=0.0)
            # a separate product: an accumulating one may round the rescaled sum in another order
            out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            largest = following
        at_out = outs + (row * heads + head)[:, None] * E + e[None, :]
        result = (out / total[:, None]).to(outs.dtype.element_ty)
        tl.store(at_out, result, mask=inside[:, None] & (e < E)[None, :])
        tl.store(lses + row * heads + head, largest + tl.log(total), mask=inside)


def attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor, spans: Sequence[Span], scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return :func:`batch_invariant_attention` by one kernel with fixed tiles."""
    (num, heads, width), groups, out_width = query.shape, keys.shape[1], values.shape[2]
    per_group = heads // groups
    rows = max(_QUERY_ROWS, triton.next_power_of_2(per_group))
    most, padded = rows // per_group, triton.next_power_of_2(max(width, out_width, 16))
    cut = [
        (span.row + done, min(most, span.num_tokens - done), span.position + done, span.first_key)
        for span in spans
        for done in range(0, span.num_tokens, most)
    ]
    blocks = torch.tensor(cut, dtype=torch.int64).to(query.device, non_blocking=True)
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    outs = query.new_zeros((num, heads, out_width))
    lses = torch.zeros((num, heads), dtype=torch.float32, device=query.device)
    _attention_kernel[(len(cut), groups)](
        query, keys, values, key_rows, blocks, scores.sink, outs, lses, scores.scale, scores.soft_cap or 1.0,
        _UNLIMITED if scores.left is None else scores.left,
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], heads,
        HEADS=per_group, ROWS=rows, KEYS=_KEYS, D=width, E=out_width,
        PADDED_D=padded, PADDED_E=padded, CAPPED=scores.soft_cap is not None, SINK=scores.sink is not None, num_warps=4,
    )  # fmt: skip
    return outs, lses


def batch_invariant_attention(
    query: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor, spans: Sequence[Span], scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return the attention [n, a, e] of ``query`` [n, a, d], in its dtype, and the log-sum-exp [n, a] in fp32 (fp64 for
    fp64), both including the sink; zeros for rows outside of all ``spans``. Not differentiable.

    Args:
        keys, values: [m, g, d] and [m, g, e].
        key_rows: row of ``keys`` of each position of each sequence, int64, one sequence after another.
    """
    if not spans:
        return query.new_zeros((*query.shape[:2], values.shape[2])), query.new_zeros(query.shape[:2]).float()
    kernel = query.is_cuda and query.dtype != torch.float64
    return (attention_triton if kernel else attention_plain)(query, keys, values, key_rows, spans, scores)
