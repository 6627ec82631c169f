"""Triton attention with a bias by head and distance, without a bias tensor of all pairs.

    s_ij = scale q_i . k_j + bias[head, j - i],   out = softmax(s) V,   lse = log sum exp s

Forward and the gradients of queries, keys and values follow FlashAttention (Dao 2023), in three kernels without
atomics: same bits every run. The query kernel also writes dS in 16 bits, for some batch rows at a time, which torch
sums to the bias gradient: a pass over memory instead of two more GEMMs. In torch: ``attention/kernels/unfused.py``.
Inside the kernels, scores are in units of log 2, for exp2.

Legend: s, t queries and keys, b batch, a query heads, g key/value groups, d head dim; M, N queries i, keys j of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

Tiling = tuple[int, int, int, int]
"""(queries, keys) of a tile, warps, pipeline stages."""
TILINGS: Mapping[str, Tiling] = {"forward": (128, 64, 8, 3), "query": (128, 64, 8, 2), "keys": (64, 128, 8, 2)}
"""Tilings of the forward kernel, the query-gradient kernel and the key/value-gradient kernel."""
_LARGEST = 2**28
"""Maximum elements of dS in memory at once (at least one batch row)."""


class Pairs(NamedTuple):
    """Visible pairs and the alignment of their bias."""

    middle: int
    """Index in a head's biases of the distance from the first query to the first key."""
    left: int | None = None
    """Pairs with j - i >= -left are visible; None: no limit. ``right`` likewise."""
    right: int | None = None
    ranges_2bs: Tensor | None = None
    """int32 [2, b, s]: start and end position of each token's document; None without documents."""


if triton is not None:

    @triton.jit
    def _rows(base, place, count, stride, D: tl.constexpr, EVEN: tl.constexpr):
        """Zeros for rows outside of [0, count). EVEN promises that all rows are inside, so that no mask is needed."""
        at = base + place[:, None].to(tl.int64) * stride + tl.arange(0, D)[None, :]
        if EVEN:
            rows = tl.load(at)
        else:
            rows = tl.load(at, mask=(place < count)[:, None], other=0.0)
        return rows

    @triton.jit
    def _store_rows(base, x, place, count, stride, D: tl.constexpr):
        at = base + place[:, None].to(tl.int64) * stride + tl.arange(0, D)[None, :]
        tl.store(at, x.to(base.dtype.element_ty), mask=(place < count)[:, None])

    @triton.jit
    def _store_pairs(base, x, i, j, num_queries, num_keys):
        at = base + i[:, None].to(tl.int64) * num_keys + j[None, :]
        tl.store(at, x.to(base.dtype.element_ty), mask=(i < num_queries)[:, None] & (j < num_keys)[None, :])

    @triton.jit
    def _visible(
        place, back, ahead, ranges, num_places, num_others, batch, row, STEP: tl.constexpr, DOCUMENTS: tl.constexpr
    ):
        """Return (first, last, low, high): start and end of the document of each position in ``place`` (0 without
        DOCUMENTS), and the range of the ``num_others`` positions of the other side that any of them sees, from ``back``
        before to ``ahead`` after; low is a multiple of STEP. ``num_places`` is the number of positions of this side."""
        first, last = place * 0, place * 0
        low, high = tl.maximum(tl.min(place) - back, 0), tl.minimum(tl.max(place) + ahead + 1, num_others)
        if DOCUMENTS:
            first = tl.load(ranges + row * num_places + place, mask=place < num_places, other=1 << 30)
            last = tl.load(ranges + (batch + row) * num_places + place, mask=place < num_places, other=0)
            low, high = tl.maximum(low, tl.min(first)), tl.minimum(high, tl.max(last))
        return first, last, low // STEP * STEP, high

    @triton.jit
    def _scores(
        products, bias, i, j, position, first, last, num_queries, num_keys, left, right,
        BAND: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    ):  # fmt: skip
        """Add the bias at distance j - i; -inf for hidden pairs: outside of the tensors (EVEN: none), with BAND outside
        of [-left, right], and with DOCUMENTS unless ``position`` (i or j) is in [first, last)."""
        distance = j - i
        if EVEN:
            scores = products + tl.load(bias + distance)
        else:
            inside = (i < num_queries) & (j < num_keys)
            scores = tl.where(inside, products + tl.load(bias + distance, mask=inside, other=0.0), float("-inf"))
        if BAND:
            scores = tl.where((distance >= -left) & (distance <= right), scores, float("-inf"))
        if DOCUMENTS:
            scores = tl.where((position >= first) & (position < last), scores, float("-inf"))
        return scores

    @triton.jit
    def _log_sums(lse, i, num_queries):
        """In units of log 2; 0 instead of -inf for queries without keys, whose weights exp2(-inf) are 0."""
        sums = tl.load(lse + i, mask=i < num_queries, other=0.0) * 1.4426950408889634
        return tl.where(sums == float("-inf"), 0.0, sums)

    @triton.jit
    def _forward_kernel(
        query, key, value, out, lse, bias, ranges, batch, heads, per_group, num_queries, num_keys,
        distances, middle, left, right, scale, q_b, q_a, q_s, k_b, k_a, k_s, v_b, v_a, v_s, o_b, o_a, o_s,
        D: tl.constexpr, BAND: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
        M: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        """Online softmax over blocks of N visible keys. A query without visible keys gets 0 and -inf. ``scale`` and
        ``bias`` are in units of log 2, lse is natural."""
        row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
        group, i = head // per_group, tl.program_id(0) * M + tl.arange(0, M)
        q = _rows(query + row * q_b + head * q_a, i, num_queries, q_s, D, EVEN)
        first, last, low, high = _visible(i, left, right, ranges, num_queries, num_keys, batch, row, N, DOCUMENTS)
        largest, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
        mixed = tl.zeros((M, D), tl.float32)
        for start in range(low, high, N):
            j = start + tl.arange(0, N)
            k = _rows(key + row * k_b + group * k_a, j, num_keys, k_s, D, EVEN)
            scores = _scores(
                tl.dot(q, tl.trans(k)) * scale, bias + head * distances + middle, i[:, None], j[None, :], j[None, :],
                first[:, None], last[:, None], num_queries, num_keys, left, right, BAND, DOCUMENTS, EVEN,
            )  # fmt: skip
            new = tl.maximum(largest, tl.max(scores, 1))
            origin = tl.where(new == float("-inf"), 0.0, new)  # 0 for a query that has seen no key: avoids inf - inf
            weights, fading = tl.exp2(scores - origin[:, None]), tl.exp2(largest - origin)
            v = _rows(value + row * v_b + group * v_a, j, num_keys, v_s, D, EVEN)
            mixed = tl.dot(weights.to(v.dtype), v, mixed * fading[:, None])
            total = total * fading + tl.sum(weights, 1)
            largest = new
        divisor = tl.where(total == 0.0, 1.0, total)
        _store_rows(out + row * o_b + head * o_a, mixed / divisor[:, None], i, num_queries, o_s, D)
        sums = (largest + tl.log2(divisor)) * 0.6931471805599453
        tl.store(lse + (row * heads + head) * num_queries + i, sums, mask=i < num_queries)

    @triton.jit
    def _grad_query_kernel(
        query, key, value, grad, out, grad_query, lse, delta, grad_pairs, bias, ranges, batch, heads, per_group,
        num_queries, num_keys, distances, middle, left, right, scale, q_b, q_a, q_s, k_b, k_a, k_s, v_b, v_a, v_s,
        g_b, g_a, g_s, o_b, o_a, o_s, dq_b, dq_a, dq_s,
        D: tl.constexpr, BAND: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
        M: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        """Also write delta = sum_d dO O and dS of all keys, without ``scale``, to ``grad_pairs`` [b, a, s, t].
        ``scale`` and ``bias`` come multiplied by log2(e). Grid: (blocks of M queries, batch x heads). Run it before the
        kernel of keys, which reads delta."""
        row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
        group, line = head // per_group, (row * heads + head) * num_queries
        i = tl.program_id(0) * M + tl.arange(0, M)
        q = _rows(query + row * q_b + head * q_a, i, num_queries, q_s, D, EVEN)
        g = _rows(grad + row * g_b + head * g_a, i, num_queries, g_s, D, EVEN)
        o = _rows(out + row * o_b + head * o_a, i, num_queries, o_s, D, EVEN)
        product = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(delta + line + i, product, mask=i < num_queries)
        sums = _log_sums(lse + line, i, num_queries)
        first, last, low, high = _visible(i, left, right, ranges, num_queries, num_keys, batch, row, N, DOCUMENTS)
        # grad_pairs is uninitialized and summed in full: write zeros to the tiles that the loop below skips
        total, nothing = tl.zeros((M, D), tl.float32), tl.zeros((M, N), tl.float32)
        for start in range(0, tl.minimum(low, num_keys), N):
            _store_pairs(grad_pairs + line * num_keys, nothing, i, start + tl.arange(0, N), num_queries, num_keys)
        for start in range(tl.maximum(low, (high + N - 1) // N * N), num_keys, N):
            _store_pairs(grad_pairs + line * num_keys, nothing, i, start + tl.arange(0, N), num_queries, num_keys)
        for start in range(low, high, N):
            j = start + tl.arange(0, N)
            k = _rows(key + row * k_b + group * k_a, j, num_keys, k_s, D, EVEN)
            v = _rows(value + row * v_b + group * v_a, j, num_keys, v_s, D, EVEN)
            scores = _scores(
                tl.dot(q, tl.trans(k)) * scale, bias + head * distances + middle, i[:, None], j[None, :], j[None, :],
                first[:, None], last[:, None], num_queries, num_keys, left, right, BAND, DOCUMENTS, EVEN,
            )  # fmt: skip
            grad_scores = tl.exp2(scores - sums[:, None]) * (tl.dot(g, tl.trans(v)) - product[:, None])
            grad_scores = grad_scores.to(k.dtype)
            total = tl.dot(grad_scores, k, total)
            _store_pairs(grad_pairs + line * num_keys, grad_scores, i, j, num_queries, num_keys)
        # times ln 2: the natural scale. dS needs no factor, because exp2 of the scores are the true weights
        total *= scale * 0.6931471805599453
        _store_rows(grad_query + row * dq_b + head * dq_a, total, i, num_queries, dq_s, D)

    @triton.jit
    def _grad_keys_kernel(
        query, key, value, grad, grad_key, grad_value, lse, delta, bias, ranges, batch, heads, per_group,
        num_queries, num_keys, distances, middle, left, right, scale, q_b, q_a, q_s, k_b, k_a, k_s, v_b, v_a, v_s,
        g_b, g_a, g_s, dk_b, dk_a, dk_s, dv_b, dv_a, dv_s,
        D: tl.constexpr, BAND: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
        M: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        """Sum over the group's query heads and visible queries. Tiles are [N, M]: no GEMM transposes them."""
        groups = heads // per_group
        row, group = (tl.program_id(1) // groups).to(tl.int64), (tl.program_id(1) % groups).to(tl.int64)
        j = tl.program_id(0) * N + tl.arange(0, N)
        k = _rows(key + row * k_b + group * k_a, j, num_keys, k_s, D, EVEN)
        v = _rows(value + row * v_b + group * v_a, j, num_keys, v_s, D, EVEN)
        # visibility is symmetric within one sequence's documents: a key's queries have its document range
        first, last, low, high = _visible(j, right, left, ranges, num_keys, num_queries, batch, row, M, DOCUMENTS)
        total_k, total_v = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
        for head in range(group * per_group, (group + 1) * per_group):
            line = (row * heads + head) * num_queries
            for start in range(low, high, M):
                i = start + tl.arange(0, M)
                q = _rows(query + row * q_b + head * q_a, i, num_queries, q_s, D, EVEN)
                g = _rows(grad + row * g_b + head * g_a, i, num_queries, g_s, D, EVEN)
                product = tl.load(delta + line + i, mask=i < num_queries, other=0.0)
                scores = _scores(
                    tl.dot(k, tl.trans(q)) * scale, bias + head * distances + middle, i[None, :], j[:, None],
                    i[None, :], first[:, None], last[:, None], num_queries, num_keys, left, right, BAND, DOCUMENTS,
                    EVEN,
                )  # fmt: skip
                weights = tl.exp2(scores - _log_sums(lse + line, i, num_queries)[None, :])
                total_v = tl.dot(weights.to(g.dtype), g, total_v)
                grad_scores = weights * (tl.dot(v, tl.trans(g)) - product[None, :])
                total_k = tl.dot(grad_scores.to(q.dtype), q, total_k)
        total_k *= scale * 0.6931471805599453
        _store_rows(grad_key + row * dk_b + group * dk_a, total_k, j, num_keys, dk_s, D)
        _store_rows(grad_value + row * dv_b + group * dv_a, total_v, j, num_keys, dv_s, D)


def _launch(
    kernel: Any, tiling: Tiling, grid: tuple[int, ...], strided: Sequence[Tensor], plain: Sequence[Tensor],
    about: tuple[Tensor, float, Pairs],
) -> None:  # fmt: skip
    """``strided``: query and key [b, heads, tokens, d], value …, passed with their strides; ``plain``: tensors without
    strides; ``about``: (bias, scale, pairs), converted to units of log 2."""
    (batch, heads, num_queries, channels), (_, groups, num_keys, _) = strided[0].shape, strided[1].shape
    bias, scale, (middle, left, right, ranges) = about
    to_log2, (m, n, num_warps, num_stages) = math.log2(math.e), tiling
    kernel[grid](
        *strided, *plain, bias.float() * to_log2, bias if ranges is None else ranges, batch, heads, heads // groups,
        num_queries, num_keys, bias.shape[1], middle, *(1 << 30 if x is None else x for x in (left, right)),
        scale * to_log2, *(size for x in strided for size in x.stride()[:3]), D=channels,
        BAND=left is not None or right is not None, DOCUMENTS=ranges is not None,
        EVEN=num_queries % m == 0 and num_keys % n == 0, M=m, N=n, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, pairs: Pairs,
    tilings: Mapping[str, Tiling] = TILINGS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out [b, a, s, d], with the dim order of ``query`` in memory, and lse fp32 [b, a, s], 0 and -inf for
    queries without visible keys. No autograd. query [b, a, s, d], key and value [b, g, t, d]: d a power of 2, last dim
    contiguous; ``bias`` [a, n] is indexed by ``pairs.middle`` + j - i, which must be inside for every pair."""
    out, lse = torch.empty_like(query), torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    tiling, (batch, heads, num_queries, _) = tilings["forward"], query.shape
    grid = (triton.cdiv(num_queries, tiling[0]), batch * heads)
    _launch(_forward_kernel, tiling, grid, (query, key, value, out), (lse,), (bias, scale, pairs))
    return out, lse


def relative_attention_backward(
    grad: Tensor, saved: Sequence[Tensor], scale: float, pairs: Pairs, tilings: Mapping[str, Tiling] = TILINGS
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and pair biases. The latter is fp32 [a, s, t], summed over the batch
    from dS rounded to the dtype of query, zero for hidden pairs; the caller sums it by distance. ``saved``: query, key,
    value, out, lse, bias of :func:`relative_attention`. Holds dS of at most ``_LARGEST`` elements (at least one batch
    row) at a time."""
    query, key, value, out, lse, bias = saved
    grad, delta = grad if grad.stride(-1) == 1 else grad.contiguous(), torch.empty_like(lse)
    (batch, heads, num_queries, _), (_, groups, num_keys, _) = query.shape, key.shape
    grads, of_pairs = [torch.empty_like(x) for x in (query, key, value)], []
    step, (m, *_), (_, n, *_) = max(1, _LARGEST // (heads * num_queries * num_keys)), tilings["query"], tilings["keys"]
    for start in range(0, batch, step):
        some = [x[start : start + step] for x in (query, key, value, grad, out, grads[0], lse, delta)]
        grad_pairs = query.new_empty(len(some[0]), heads, num_queries, num_keys)
        ranges = None if pairs.ranges_2bs is None else pairs.ranges_2bs[:, start : start + step].contiguous()
        grid, about = (triton.cdiv(num_queries, m), len(some[0]) * heads), pairs._replace(ranges_2bs=ranges)
        _launch(_grad_query_kernel, tilings["query"], grid, some[:6], (*some[6:], grad_pairs), (bias, scale, about))
        of_pairs.append(grad_pairs.sum(0, dtype=torch.float32))
    grid, strided = (triton.cdiv(num_keys, n), batch * groups), (query, key, value, grad, *grads[1:])
    _launch(_grad_keys_kernel, tilings["keys"], grid, strided, (lse, delta), (bias, scale, pairs))
    return *grads, sum(of_pairs[1:], of_pairs[0])
