"""Triton kernels of linear recurrences in chunks of 64 tokens: the gated delta rule (arXiv 2412.06464) and, without its
correction, the state-space recurrence of Mamba-2 (arXiv 2405.21060). Per head, a state S [k, v] in fp32:

    S_t = exp(g_t) S_(t-1) + k_t u_t^T,   o_t = S_t^T q_t,   u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t)   or   v_t

With S the state before a chunk, G the sums of g from its begin, D_ij = exp(G_i - G_j) for j <= i, start_i = exp(G_i),
end_i = exp(G_last - G_i), the chunk computes

    (1 + A) u = r = beta (v - start k S),   A_ij = beta_i k_i.k_j D_ij for j < i,   T = (1 + A)^-1
    o = start q S + P u,   P = q k^T D;     S <- exp(G_last) S + k^T (end u)

and, from gradients do and dS of the state after the chunk,

    du = P^T do + end k dS,   y = T^T du   (the gradient of r; A has the gradient -y u^T)
    dS <- exp(G_last) dS + q^T (start do) - k^T (beta start y)

``channel_decays.py`` has decays per channel (Kimi delta attention), ``triangular_inverse.py`` computes T,
``linear_attention_gradients.py`` the gradients of all chunks.

One kernel computes T and P of all chunks. A scan forward and one backward follow, in parallel over heads and blocks of
v. Two more kernels compute the remaining gradients of all chunks. The backward pass computes T, P and the states again.
A factor exp(G_i) of q_i or k_i, and exp(-G_j) of k_j, gives g the gradient of this q_i, k_i or k_j times itself.
There are no atomics: same bits every run. G, start, end and all sums are fp32; operands of products have the dtype of
the inputs.

No product reads the transpose of another product's result: Triton 3.4 to 3.7.0 compile that wrongly for Hopper GPUs.
A further product computes the transpose, or transposed operands are loaded from memory. A pipelined loop of products
(``_products``) reads its blocks for nothing else: Triton 3.6 then overwrites them before the product has ended.

Legend: s tokens, b batch, h heads of v, a heads of q and k (h / a consecutive heads share one), k, v channels, n
chunks, c tokens of a chunk, p tokens padded to full chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.dispatch import kernels_serve, num_sms
from megatron.core.fusions.installed_triton import tl, triton

CHUNK = 64
Tiling = tuple[int, int, int]
"""Channels per tile (or program), warps and pipeline stages. Channels of v; in ``channel_pairs``, ``gradients`` and
``channel_gradients`` of k."""
TILINGS: Mapping[str, Tiling] = {
    "pairs": (0, 4, 1), "channel_pairs": (32, 4, 2), "forward": (32, 4, 3), "states": (32, 4, 3),
    "backward": (32, 4, 3), "pair_gradients": (64, 8, 2), "gradients": (64, 4, 1), "channel_gradients": (64, 8, 1),
}  # fmt: skip
"""Tilings of the kernels. The passes ``forward`` (outputs), ``states`` and ``backward`` are sequential: their latency
is their time. Three stages leave room for one program per SM (:func:`_scan_options`)."""
CANDIDATES: Mapping[str, tuple[Tiling, ...]] = {
    "pairs": ((0, 4, 1),),
    "channel_pairs": ((32, 4, 2), (64, 4, 1), (64, 4, 2)),
    "forward": ((32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2)),
    "states": ((32, 4, 2), (32, 4, 3), (64, 4, 3), (64, 8, 3)),
    "backward": ((32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2)),
    "pair_gradients": ((64, 4, 1), (64, 8, 1), (64, 8, 2)),
    "gradients": ((64, 4, 1), (64, 4, 2)),
    "channel_gradients": ((64, 8, 1), (64, 8, 2)),
}
"""Tilings that benchmarks time and GPU tests check."""


if triton is not None:
    from megatron.core.fusions.channel_decays import (
        _channel_decay_kernel,
        _channel_products,
        _decays,
        _rows,
        _square,
    )
    from megatron.core.fusions.linear_attention_gradients import _gradients_kernel, _pair_gradients_kernel
    from megatron.core.fusions.triangular_inverse import _inverse

    @triton.jit
    def _decay_kernel(
        log_decay, beta, follows, vectors, begun, length, batch, heads,
        DELTA: tl.constexpr, DOCUMENTS: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr,
    ):  # fmt: skip
        """Write G, start, end and beta to ``vectors`` [4, b, h, p], and the number of documents that have begun in the
        chunk up to each token to ``begun`` [b, p]; start and end are 0 across the beginning of a document."""
        token, row = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1)
        head, padded = tl.program_id(2) * HEADS + tl.arange(0, HEADS), tl.num_programs(0) * C
        at, inside = (token[:, None] * batch + row) * heads + head[None, :], (head < heads)[None, :]
        present = inside & (token < length)[:, None]
        decay = tl.load(log_decay + at, mask=present, other=0.0)
        sums, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        start, end = tl.exp(tl.minimum(sums, 0.0)), tl.exp(tl.minimum(last[None, :] - sums, 0.0))
        number = tl.zeros((C,), tl.int32)
        if DOCUMENTS:
            begins = (tl.load(follows + token * batch + row, mask=token < length, other=1) == 0).to(tl.int32)
            number = tl.cumsum(begins, 0)
            start = tl.where((number == 0)[:, None], start, 0.0)
            end = tl.where((number == tl.sum(begins, 0))[:, None], end, 0.0)
        tl.store(begun + row * padded + token, number)
        out, size = vectors + (row * heads + head[None, :]) * padded + token[:, None], batch * heads * padded
        tl.store(out, sums, mask=inside)
        tl.store(out + size, start, mask=inside)
        tl.store(out + 2 * size, end, mask=inside)
        if DELTA:
            tl.store(out + 3 * size, tl.load(beta + at, mask=present, other=0.0), mask=inside)

    @triton.jit
    def _pairs_kernel(
        query, key, vectors, begun, channel_sums, scores, inverse, length, batch, heads, per_key,
        q_s, q_b, q_a, k_s, k_b, k_a,
        K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Write P to ``scores`` and T to ``inverse`` [b, h, n, c, c]."""
        chunk, row, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
        line, chunks = tl.program_id(1).to(tl.int64), tl.num_programs(0)
        kind = scores.dtype.element_ty
        place, padded, first, remaining = tl.arange(0, C), chunks * C, chunk.to(tl.int64) * C, length - chunk * C
        token, i, j = chunk * C + place, place[:, None], place[None, :]
        q_at = query + first * q_s + row.to(tl.int64) * q_b + (head // per_key) * q_a
        k_at = key + first * k_s + row.to(tl.int64) * k_b + (head // per_key) * k_a
        if not CHANNELS:
            q, k = _rows(q_at, place, remaining, q_s, K), _rows(k_at, place, remaining, k_s, K)
        sums, number = tl.load(vectors + line * padded + token), tl.load(begun + row * padded + token)
        near = _decays(sums, sums, number, number, i >= j)
        if CHANNELS:
            stride = batch * heads * K
            channel_sums += first * stride + (row * heads + head) * K
            qk, kk = _channel_products(q_at, k_at, channel_sums, place, remaining, q_s, k_s, stride, K, BK, C)
        else:
            qk = tl.dot(q, tl.trans(k))
        square = (line * chunks + chunk) * C * C
        tl.store(_square(scores + square, place, place, C), (qk * near).to(kind))
        if DELTA:
            beta = tl.load(vectors + (3 * batch * heads + line) * padded + token)[:, None]
            if not CHANNELS:
                kk = tl.dot(k, tl.trans(k))
            t = _inverse(tl.where(i > j, beta * near * kk, 0.0), C)
            tl.store(_square(inverse + square, place, place, C), t.to(kind))

    @triton.jit
    def _forward_kernel(
        query, key, end_key, totals, value, scores, inverse, vectors, state, out, corrections, states, last, length,
        batch, heads, per_key, chunks, q_s, q_b, q_a, k_s, k_b, k_a, v_s, v_b, v_h,
        K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
        CHANNELS: tl.constexpr, OUT: tl.constexpr,
    ):  # fmt: skip
        """Scan the chunks of a head from ``state`` [b, h, k, v] to ``last``. OUT: write ``out`` [s, b, h, v]. Otherwise
        write the states before the chunks [b, h, n, k, v] and, with DELTA, u to ``corrections`` [b, h, p, v]."""
        row, head, line = tl.program_id(1) // heads, tl.program_id(1) % heads, tl.program_id(1).to(tl.int64)
        place, column = tl.arange(0, C), tl.program_id(0) * BV
        padded, size = chunks * C, batch * heads * chunks * C
        q_at = query + row.to(tl.int64) * q_b + (head // per_key) * q_a
        k_at = key + row.to(tl.int64) * k_b + (head // per_key) * k_a
        v_at = value + row.to(tl.int64) * v_b + head * v_h + column
        o_at, o_s = out + (row.to(tl.int64) * heads + head) * V + column, batch * heads * V
        within = tl.arange(0, K)[:, None] * V + column + tl.arange(0, BV)[None, :]
        s = tl.load(state + line * K * V + within)
        end_at = end_key + row.to(tl.int64) * k_b + head * k_a
        for chunk in range(0, chunks):
            remaining = length - chunk * C
            k, v = _rows(k_at, place, remaining, k_s, K), _rows(v_at, place, remaining, v_s, BV)
            at = vectors + line * padded + chunk * C + place
            start, end = tl.load(at + size)[:, None], tl.load(at + 2 * size)[:, None]
            total = tl.load(vectors + size + line * padded + chunk * C + C - 1)
            k_end = k
            if CHANNELS:
                k_end = _rows(end_at, place, remaining, k_s, K)
                end_at += C * k_s
                total *= tl.load(totals + (line * chunks + chunk) * K + tl.arange(0, K))[:, None]
            low = s.to(k.dtype)
            square = (line * chunks + chunk) * C * C
            if not OUT:
                tl.store(states + (line * chunks + chunk) * K * V + within, low)
            u = v.to(tl.float32)
            if DELTA:
                beta, t = tl.load(at + 3 * size)[:, None], tl.load(_square(inverse + square, place, place, C))
                u = tl.dot(t, (beta * (u - start * tl.dot(k, low))).to(k.dtype))
                if not OUT:
                    u_at = corrections + (line * padded + chunk * C) * V + column
                    tl.store(u_at + place[:, None] * V + tl.arange(0, BV)[None, :], u.to(k.dtype))
            if OUT:
                q, p = _rows(q_at, place, remaining, q_s, K), tl.load(_square(scores + square, place, place, C))
                o = tl.dot(p, u.to(k.dtype), start * tl.dot(q, low)).to(out.dtype.element_ty)
                tl.store(o_at + place[:, None] * o_s + tl.arange(0, BV)[None, :], o, mask=(place < remaining)[:, None])
                q_at += C * q_s
                o_at += C * o_s
            s = tl.dot(tl.trans(k_end), (end * u).to(k.dtype), total * s)
            k_at += C * k_s
            v_at += C * v_s
        tl.store(last + line * K * V + within, s)

    @triton.jit
    def _backward_kernel(
        query, key, end_key, totals, grad, scores, inverse, vectors, grad_last, grad_states, solved, grad_state, length,
        batch, heads, per_key, chunks, q_s, q_b, q_a, k_s, k_b, k_a,
        K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Scan the chunks of a head backward from ``grad_last`` to ``grad_state`` [b, h, k, v], with the gradient
        ``grad`` [s, b, h, v] of the outputs. Write dS after each chunk [b, h, n, k, v], and y (du without DELTA) to
        ``solved`` [b, h, p, v]."""
        row, head, line = tl.program_id(1) // heads, tl.program_id(1) % heads, tl.program_id(1).to(tl.int64)
        place, column = tl.arange(0, C), tl.program_id(0) * BV
        padded, size = chunks * C, batch * heads * chunks * C
        q_at = query + row.to(tl.int64) * q_b + (head // per_key) * q_a
        k_at = key + row.to(tl.int64) * k_b + (head // per_key) * k_a
        g_at = grad + (row.to(tl.int64) * heads + head) * V + column
        within = tl.arange(0, K)[:, None] * V + column + tl.arange(0, BV)[None, :]
        ds, last = tl.load(grad_last + line * K * V + within), tl.cast(chunks - 1, tl.int64) * C
        g_s, end_at = batch * heads * V, end_key + row.to(tl.int64) * k_b + head * k_a + last * k_s
        q_at, k_at, g_at = q_at + last * q_s, k_at + last * k_s, g_at + last * g_s
        for step in range(0, chunks):
            chunk = chunks - 1 - step
            remaining = length - chunk * C
            k, q = _rows(k_at, place, remaining, k_s, K), _rows(q_at, place, remaining, q_s, K)
            g = _rows(g_at, place, remaining, g_s, BV)
            at = vectors + line * padded + chunk * C + place
            start, end = tl.load(at + size)[:, None], tl.load(at + 2 * size)[:, None]
            total = tl.load(vectors + size + line * padded + chunk * C + C - 1)
            k_end = k
            if CHANNELS:
                k_end = _rows(end_at, place, remaining, k_s, K)
                end_at -= C * k_s
                total *= tl.load(totals + (line * chunks + chunk) * K + tl.arange(0, K))[:, None]
            low = ds.to(k.dtype)
            tl.store(grad_states + (line * chunks + chunk) * K * V + within, low)
            square = (line * chunks + chunk) * C * C + place[:, None] + place[None, :] * C  # transposed
            du = tl.dot(tl.load(scores + square), g, end * tl.dot(k_end, low))
            ds = tl.dot(tl.trans(q), (start * g).to(k.dtype), total * ds)
            if DELTA:
                beta = tl.load(at + 3 * size)[:, None]
                du = tl.dot(tl.load(inverse + square), du.to(k.dtype))
                ds = tl.dot(tl.trans(k), (-beta * start * du).to(k.dtype), ds)
            y_at = solved + (line * padded + chunk * C) * V + column
            tl.store(y_at + place[:, None] * V + tl.arange(0, BV)[None, :], du.to(k.dtype))
            q_at -= C * q_s
            k_at -= C * k_s
            g_at -= C * g_s
        tl.store(grad_state + line * K * V + within, ds)


@dataclass(frozen=True)
class _Chunks:
    """Arguments of the kernels."""

    delta: bool
    query: Tensor
    key: Tensor
    value: Tensor
    vectors: Tensor
    """G, start, end, beta: fp32 [4, b, h, p]."""
    begun: Tensor
    """int32 [b, p] (``_decay_kernel``)."""
    state: Tensor
    log_decay: Tensor | None
    """g per channel, contiguous [s, b, h, k]; ``vectors`` then have those of g = 0, which are 0 or 1 by documents."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.query, self.key, self.value, self.vectors, self.begun, self.state, self.log_decay

    @property
    def count(self) -> int:
        return self.begun.shape[1] // CHUNK

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(s, b, h, h / a)."""
        return (*self.value.shape[:3], self.value.shape[2] // self.key.shape[2])

    def strides(self, *tensors: Tensor) -> list[int]:
        return [stride for x in tensors for stride in x.stride()[:3]]

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.value.new_empty((*self.state.shape[:2], *shape), dtype=dtype)


def _options(kernel: Any, name: str, tilings: Mapping[str, Tiling], chunks: _Chunks) -> dict[str, Any]:
    """Return the constants that ``kernel`` takes, and its tiling."""
    width, num_warps, num_stages = tilings[name]
    block = {"gradients": 128, "channel_gradients": 64}.get(name, width)
    # BK, BV: the largest power of two that divides both
    constants = {
        "K": chunks.key.shape[-1], "V": chunks.value.shape[-1], "BK": math.gcd(width, chunks.key.shape[-1]),
        "BV": math.gcd(block, chunks.value.shape[-1]), "C": CHUNK,
        "DELTA": chunks.delta, "CHANNELS": chunks.log_decay is not None,
    }  # fmt: skip
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return options | {constant: value for constant, value in constants.items() if constant in kernel.arg_names}


def _scan_options(
    kernel: Any, name: str, tilings: Mapping[str, Tiling], chunks: _Chunks
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the options of a scan: two stages at most if programs must share an SM."""
    options, (batch, heads, _, channels) = _options(kernel, name, tilings, chunks), chunks.state.shape
    grid = (channels // options["BV"], batch * heads)
    if math.prod(grid) > num_sms(chunks.state.device) and name != "states":
        options["num_stages"] = min(options["num_stages"], 2)
    return grid, options


def _prepare(inputs: Sequence[Tensor], beta: Tensor | None, follows: Tensor | None, state: Tensor) -> _Chunks:
    query, key, value, log_decay = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs)
    length, batch, heads = log_decay.shape[:3]
    per_channel = log_decay.contiguous() if log_decay.ndim == 4 else None
    if per_channel is not None:
        log_decay = log_decay.new_zeros(length, batch, heads)
    count, block = triton.cdiv(length, CHUNK), min(triton.next_power_of_2(heads), 32)
    vectors = log_decay.new_empty((4, batch, heads, count * CHUNK), dtype=torch.float32)
    begun = log_decay.new_empty((batch, count * CHUNK), dtype=torch.int32)
    small = [None if x is None else x.contiguous() for x in (log_decay, beta, follows)]
    _decay_kernel[(count, batch, triton.cdiv(heads, block))](
        *(vectors if x is None else x for x in small), vectors, begun, length, batch, heads, DELTA=beta is not None,
        DOCUMENTS=follows is not None, C=CHUNK, HEADS=block,
    )  # fmt: skip
    return _Chunks(beta is not None, query, key, value, vectors, begun, state.contiguous(), per_channel)


class _Operands(NamedTuple):
    """Operands of the scans: with decays per channel start q, start k, end k, exp(G_last) and G, else q, k, k and
    unused ones."""

    query: Tensor
    key: Tensor
    end_key: Tensor
    totals: Tensor
    sums: Tensor


def _operands(chunks: _Chunks) -> _Operands:
    query, key = chunks.query, chunks.key
    if chunks.log_decay is None:
        return _Operands(query, key, key, chunks.vectors, chunks.vectors)
    _, batch, heads, _ = chunks.sizes
    width, block, shape = key.shape[-1], min(key.shape[-1], 32), chunks.log_decay.shape
    start_query, start_key, end_key = (torch.empty(shape, dtype=key.dtype, device=key.device) for _ in range(3))
    totals = chunks.new(chunks.count, width, dtype=torch.float32)
    operands = _Operands(start_query, start_key, end_key, totals, torch.empty_like(chunks.log_decay))
    _channel_decay_kernel[(chunks.count, batch * heads, width // block)](
        query, key, chunks.log_decay, operands.sums, *operands[:4], *chunks.sizes, *chunks.strides(query, key),
        K=width, BK=block, C=CHUNK,
    )  # fmt: skip
    return operands


def _pairs(chunks: _Chunks, sums: Tensor, tilings: Mapping[str, Tiling]) -> tuple[Tensor, Tensor]:
    """Return P and T [b, h, n, c, c]; without corrections T is P."""
    query, key = chunks.query, chunks.key
    scores = chunks.new(chunks.count, CHUNK, CHUNK, dtype=query.dtype)
    inverse = torch.empty_like(scores) if chunks.delta else scores
    _, batch, heads, _ = chunks.sizes
    _pairs_kernel[(chunks.count, batch * heads)](
        query, key, chunks.vectors, chunks.begun, sums, scores, inverse, *chunks.sizes, *chunks.strides(query, key),
        **_options(_pairs_kernel, "pairs" if chunks.log_decay is None else "channel_pairs", tilings, chunks),
    )  # fmt: skip
    return scores, inverse


def _scan(
    chunks: _Chunks, operands: _Operands, pairs: tuple[Tensor, Tensor], tilings: Mapping[str, Tiling], *, states: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (outputs [s, b, h, v], u, last state), or with ``states`` (states before the chunks [b, h, n, k, v], u
    [b, h, p, v], last state); u only with both ``states`` and corrections."""
    heads, (width, channels), last = chunks.sizes[2], chunks.state.shape[-2:], torch.empty_like(chunks.state)
    grid, options = _scan_options(_forward_kernel, "states" if states else "forward", tilings, chunks)
    out = corrections = chunks.value
    if states:
        out = chunks.new(chunks.count, width, channels, dtype=chunks.key.dtype)
        corrections = chunks.new(chunks.count * CHUNK, channels, dtype=chunks.key.dtype) if chunks.delta else out
    else:
        out = torch.empty(chunks.value.shape, dtype=chunks.value.dtype, device=last.device)
    _forward_kernel[grid](
        *operands[:4], chunks.value, *pairs, chunks.vectors, chunks.state, out, corrections, out, last,
        *chunks.sizes[:3], heads // operands.key.shape[2], chunks.count, *chunks.strides(*operands[:2], chunks.value),
        OUT=not states, **options,
    )  # fmt: skip
    return out, corrections, last


def _gradients(chunks: _Chunks, grad: Tensor, grad_last: Tensor, tilings: Mapping[str, Tiling]) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value, log-decays, beta and state."""
    query, key, value = chunks.query, chunks.key, chunks.value
    length, batch, heads, per_key = chunks.sizes
    operands = _operands(chunks)
    pairs = _pairs(chunks, operands.sums, tilings)
    states, corrections, _ = _scan(chunks, operands, pairs, tilings, states=True)
    grad_states, grad_state = torch.empty_like(states), torch.empty_like(chunks.state)
    solved = chunks.new(chunks.count * CHUNK, states.shape[-1], dtype=key.dtype)
    grid, options = _scan_options(_backward_kernel, "backward", tilings, chunks)
    _backward_kernel[grid](
        *operands[:4], grad, *pairs, chunks.vectors, grad_last, grad_states, solved, grad_state, *chunks.sizes[:3],
        heads // operands.key.shape[2], chunks.count, *chunks.strides(*operands[:2]), **options,
    )  # fmt: skip
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)]
    grad_value = torch.empty(value.shape, dtype=value.dtype, device=value.device) if chunks.delta else value
    # P and T are not read again
    partial = torch.empty_like(chunks.vectors[:2])
    _pair_gradients_kernel[(chunks.count, batch * heads)](
        value, grad, corrections, solved, chunks.vectors, chunks.begun, *pairs, partial, grad_value,
        *chunks.sizes[:3], *chunks.strides(value),
        **_options(_pair_gradients_kernel, "pair_gradients", tilings, chunks),
    )  # fmt: skip
    name = "gradients" if chunks.log_decay is None else "channel_gradients"
    options = _options(_gradients_kernel, name, tilings, chunks)
    parts = key.shape[-1] // options["BK"]
    small = [partial.new_empty(parts, length, batch, heads) for _ in range(2)]
    of_decay = small[0] if chunks.log_decay is None else torch.empty_like(chunks.log_decay)
    _gradients_kernel[(parts, chunks.count, batch * key.shape[2])](
        query, key, value, grad, corrections, states, grad_states, solved, chunks.vectors, operands.sums, *pairs,
        partial, *grads, of_decay, small[1], *chunks.sizes, *chunks.strides(query, key, value), **options,
    )  # fmt: skip
    of_decay = of_decay.sum(0) if chunks.log_decay is None else of_decay
    if not chunks.delta:
        grad_value = solved[:, :, :length].permute(2, 0, 1, 3)
    return *grads, grad_value, of_decay, small[1].sum(0), grad_state


class _LinearAttention(torch.autograd.Function):
    """Saves the inputs and four numbers per token and head."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, beta, follows, state, ctx.tilings = arguments
        chunks = _prepare(inputs, beta, follows, state)
        operands = _operands(chunks)
        pairs = _pairs(chunks, operands.sums, ctx.tilings)
        out, _, last = _scan(chunks, operands, pairs, ctx.tilings, states=False)
        ctx.delta = chunks.delta
        ctx.save_for_backward(*chunks.tensors)
        return out, last

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        chunks = _Chunks(ctx.delta, *ctx.saved_tensors)
        *grads, of_beta, of_state = _gradients(chunks, grad.contiguous(), grad_last.contiguous(), ctx.tilings)
        return *grads, of_beta if ctx.delta else None, None, of_state, None


def kernels_fit(key: Tensor, value: Tensor) -> bool:
    """Whether :func:`linear_attention` computes ``key`` [s, b, a, k] and ``value`` [s, b, h, v]: one of them is bf16,
    on a Hopper GPU (other GPUs are not tested); k is 64 or 128, v a multiple of 16."""
    if not key.is_cuda or torch.bfloat16 not in (key.dtype, value.dtype) or not kernels_serve(torch.bfloat16):
        return False
    fits = key.shape[-1] in (64, 128) and value.shape[-1] % 16 == 0
    return fits and torch.cuda.get_device_capability(key.device) == (9, 0)


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None, follows: Tensor | None,
    state: Tensor, tilings: Mapping[str, Tiling] = TILINGS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs [s, b, h, v] and the state [b, h, k, v] after the last token in fp32, by kernels.
    ``ssm/delta_rule.py`` describes the arguments; ``beta`` None: ``ssm/state_space.py``. Query, key and value are
    rounded to bf16 if one of key and value is bf16; outputs have their dtype. Decays per channel need ``beta``."""
    assert log_decay.ndim == 3 or beta is not None
    dtype = torch.bfloat16 if torch.bfloat16 in (key.dtype, value.dtype) else value.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    beta = None if beta is None else beta.float()
    return _LinearAttention.apply(query, key, value, log_decay.float(), beta, follows, state.float(), tilings)
