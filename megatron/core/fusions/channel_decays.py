"""Triton kernels of linear recurrences with decays per channel of a key (Kimi delta attention, arXiv 2510.26692): the
kernels of ``linear_attention.py``, whose docstring has the formulas, that differ for them.

g, G, start and end have k elements. start and end multiply q and k before the scans, and the factors per head only tell
documents apart. D_ij is a factor inside of the sums over channels. Let m be the last token of the first half of the
smallest of the aligned blocks of 2, 4, .. 64 tokens that contain i and j. Then D_ij = exp(G_i - G_m) exp(G_m - G_j),
and no exponent exceeds 0. One product of matrices computes such pairs of all blocks of a size.
"""

from megatron.core.fusions.installed_triton import tl, triton

if triton is not None:

    @triton.jit
    def _rows(base, token, length, stride, WIDTH: tl.constexpr):
        """Rows ``token`` of [s, WIDTH]; zeros from ``length`` on."""
        at = base + token[:, None].to(tl.int64) * stride + tl.arange(0, WIDTH)[None, :]
        return tl.load(at, mask=(token < length)[:, None], other=0.0)

    @triton.jit
    def _square(base, i, j, C: tl.constexpr):
        return base + i[:, None] * C + j[None, :]

    @triton.jit
    def _channel_decay_kernel(
        query, key, log_decay, sums, start_query, start_key, end_key, totals, length, batch, heads, per_key,
        q_s, q_b, q_a, k_s, k_b, k_a, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Write G, start q, start k and end k [s, b, h, k], without documents, and exp(G_last) to ``totals``
        [b, h, n, k]."""
        chunk, row, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
        token, first, stride = chunk * C + tl.arange(0, C), tl.program_id(2) * BK, batch * heads * K
        at, inside = (row * heads + head) * K + first, (token < length)[:, None]
        decay = _rows(log_decay + at, token, length, stride, BK)
        q = _rows(query + row.to(tl.int64) * q_b + (head // per_key) * q_a + first, token, length, q_s, BK)
        k = _rows(key + row.to(tl.int64) * k_b + (head // per_key) * k_a + first, token, length, k_s, BK)
        total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        start, end = tl.exp(tl.minimum(total, 0.0)), tl.exp(tl.minimum(last[None, :] - total, 0.0))
        out = at + token[:, None].to(tl.int64) * stride + tl.arange(0, BK)[None, :]
        tl.store(sums + out, total, mask=inside)
        tl.store(start_query + out, (start * q).to(k.dtype), mask=inside)
        tl.store(start_key + out, (start * k).to(k.dtype), mask=inside)
        tl.store(end_key + out, (end * k).to(k.dtype), mask=inside)
        line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + chunk
        tl.store(totals + line * K + first + tl.arange(0, BK), tl.exp(tl.minimum(last, 0.0)))

    @triton.jit
    def _to_middle(sums_at, sums, token, level, length, stride, WIDTH: tl.constexpr):
        """exp(-|G - G of the middle|) per channel, at most 1: the middle of a token's block of 2^(level + 1) tokens is
        the last token of the block's first half."""
        middle = (((token >> level) | 1) << level) - 1
        return tl.exp(-tl.abs(sums - _rows(sums_at, middle, length, stride, WIDTH)))

    @triton.jit
    def _channel_products(
        query, key, sums_at, token, length, q_s, k_s, stride, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr
    ):
        """Sums over channels of q_i k_j D_ij for j <= i, and of k_i k_j D_ij for j < i."""
        i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        qk, kk = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        for block in range(0, K, BK):
            q, k = _rows(query + block, token, length, q_s, BK), _rows(key + block, token, length, k_s, BK)
            sums = _rows(sums_at + block, token, length, stride, BK)
            qk += tl.where(i == j, tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[:, None], 0.0)
            for level in range(0, 6):  # C = 2^6
                near = _to_middle(sums_at + block, sums, token, level, length, stride, BK)
                q_near, k_near = (q * near).to(k.dtype), (k * near).to(k.dtype)
                halves = ((i ^ j) >> level) == 1
                qk += tl.where(halves, tl.dot(q_near, tl.trans(k_near)), 0.0)
                kk += tl.where(halves, tl.dot(k_near, tl.trans(k_near)), 0.0)
        return qk, kk

    @triton.jit
    def _channel_gradients_kernel(
        query, key, grad, corrections, states, grad_states, solved, vectors, channel_sums, of_scores, of_system,
        partial, grad_query, grad_key, grad_decay, grad_beta, length, batch, heads, per_key,
        q_s, q_b, q_a, k_s, k_b, k_a, V, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """``_gradients_kernel`` with decays per channel, for BK of the K channels; ``grad_beta`` [K / BK, s, b, h] has
        the parts of these channels. A factor exp(G_i) of q_i or k_i is in the gradients ``of_q`` and, without beta,
        ``left``, a factor exp(-G_j) of k_j in ``right``."""
        chunk, groups, chunks, part = tl.program_id(0), heads // per_key, tl.num_programs(0), tl.program_id(2)
        row, group, channel = tl.program_id(1) // groups, tl.program_id(1) % groups, part * BK + tl.arange(0, BK)
        place, padded, size, stride = tl.arange(0, C), chunks * C, batch * heads * chunks * C, batch * heads * K
        token, i, j = chunk * C + place, place[:, None], place[None, :]
        inside, final = (token < length)[:, None], tl.minimum(chunk * C + C, length) - 1
        q = _rows(query + row.to(tl.int64) * q_b + group * q_a + part * BK, token, length, q_s, BK)
        k = _rows(key + row.to(tl.int64) * k_b + group * k_a + part * BK, token, length, k_s, BK)
        dq, dk = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
        for head in range(group * per_key, (group + 1) * per_key):
            line = (row * heads + head).to(tl.int64)
            of_q, left = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
            right, of_total = tl.zeros((C, BK), tl.float32), tl.zeros((BK,), tl.float32)
            for block in range(0, V, BV):
                matrix = ((line * chunks + chunk) * K + channel[:, None]) * V + block + tl.arange(0, BV)[None, :]
                s, ds = tl.load(states + matrix), tl.load(grad_states + matrix)
                of_total += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
                g = _rows(grad + (row.to(tl.int64) * heads + head) * V + block, token, length, batch * heads * V, BV)
                u = _rows(corrections + line * padded * V + block, token, padded, V, BV)
                y = _rows(solved + line * padded * V + block, token, padded, V, BV)
                of_q += tl.dot(g, tl.trans(s))
                left -= tl.dot(y, tl.trans(s))
                right += tl.dot(u, tl.trans(ds))
            sums_at = channel_sums + (row * heads + head) * K + part * BK
            sums = _rows(sums_at, token, length, stride, BK)
            last = tl.load(channel_sums + final.to(tl.int64) * stride + (row * heads + head) * K + channel)
            at = vectors + line * padded + token
            start = tl.load(at + size)[:, None] * tl.exp(tl.minimum(sums, 0.0))
            of_q, left = start * of_q, start * left
            right *= tl.load(at + 2 * size)[:, None] * tl.exp(tl.minimum(last[None, :] - sums, 0.0))
            total = tl.load(vectors + size + line * padded + chunk * C + C - 1) * tl.exp(tl.minimum(last, 0.0))
            of_last = tl.sum(k * right, 0) + total * of_total
            square = (line * chunks + chunk) * C * C
            of_p = tl.load(_square(of_scores + square, place, place, C))
            of_a = tl.load(_square(of_system + square, place, place, C))
            for level in range(0, 6):  # C = 2^6
                near = _to_middle(sums_at, sums, token, level, length, stride, BK)
                q_near, k_near = (q * near).to(k.dtype), (k * near).to(k.dtype)
                halves, second = ((i ^ j) >> level) == 1, ((i >> level) & 1) == 1
                of_q += near * tl.dot(tl.where(halves & (i > j), of_p, 0.0).to(k.dtype), k_near)
                of_key = tl.dot(tl.where(halves & (i < j), of_p, 0.0).to(k.dtype), q_near)
                of_key = near * tl.dot(tl.where(halves, of_a, 0.0).to(k.dtype), k_near, of_key)
                left += tl.where(second, of_key, 0.0)
                right += tl.where(second, 0.0, of_key)
            beta, same = tl.load(at + 3 * size)[:, None], tl.sum(tl.where(i == j, of_p, 0.0).to(tl.float32), 1)[:, None]
            dq += of_q + same * k
            dk += beta * left + right + same * q
            small = (token * batch + row) * heads + head
            of_beta = tl.where(part == 0, tl.load(partial + size + line * padded + token), 0.0) + tl.sum(k * left, 1)
            tl.store(grad_beta + part * length * batch * heads + small, of_beta, mask=token < length)
            rise = q * of_q + k * (beta * left - right)
            decay = tl.cumsum(rise, 0, reverse=True) + of_last[None, :]  # g_j is part of G_i for i >= j
            tl.store(grad_decay + small[:, None].to(tl.int64) * K + channel[None, :], decay, mask=inside)
        out = ((token[:, None].to(tl.int64) * batch + row) * groups + group) * K + channel[None, :]
        tl.store(grad_query + out, dq.to(grad_query.dtype.element_ty), mask=inside)
        tl.store(grad_key + out, dk.to(grad_key.dtype.element_ty), mask=inside)
