"""Triton kernels of the gradients of linear recurrences, in parallel over chunks, after the scans of
``linear_attention.py``, whose docstring has the formulas and the names."""

from megatron.core.fusions.installed_triton import tl, triton

if triton is not None:
    from megatron.core.fusions.channel_decays import _add_pairs, _decays, _from_middles, _products, _rows, _square

    @triton.jit
    def _pair_gradients_kernel(
        value, grad, corrections, solved, vectors, begun, of_scores, of_system, small, grad_value,
        length, batch, heads, v_s, v_b, v_h, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
    ):  # fmt: skip
        """Write to ``of_scores`` [b, h, n, c, c] the gradients of q_i.k_j through P (j < i), to ``of_system`` of
        beta_i k_i.k_j through A (j < i), elsewhere 0, and to ``small`` [2, b, h, p] the gradients of q_i.k_i. With
        DELTA write the gradient of value, and to ``small`` what value contributes to the gradient of beta."""
        chunk, row, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
        line, chunks = tl.program_id(1).to(tl.int64), tl.num_programs(0)
        place, padded, size = tl.arange(0, C), chunks * C, batch * heads * chunks * C
        token, i, j = chunk * C + place, place[:, None], place[None, :]
        first, remaining, stride = chunk.to(tl.int64) * C, length - chunk * C, batch * heads * V
        value += first * v_s + row.to(tl.int64) * v_b + head * v_h
        grad, columns = grad + first * stride + (row * heads + head) * V, tl.arange(0, BV)[None, :]
        grad_value += first * stride + (row * heads + head) * V
        corrections, solved = corrections + (line * padded + first) * V, solved + (line * padded + first) * V
        at = vectors + line * padded + token
        sums, number = tl.load(at), tl.load(begun + row * padded + token)
        of_p, of_a = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        beta, total = sums * 0.0, sums * 0.0
        if DELTA:
            beta = tl.load(at + 3 * size)
        for block in range(0, V, BV):
            g = _rows(grad + block, place, remaining, stride, BV)
            if DELTA:
                u, y = _rows(corrections + block, place, C, V, BV), _rows(solved + block, place, C, V, BV)
                of_a -= tl.dot(y, tl.trans(u))
                v = _rows(value + block, place, remaining, v_s, BV)
                total += tl.sum(y.to(tl.float32) * v.to(tl.float32), 1)
                dv = (beta[:, None] * y.to(tl.float32)).to(grad_value.dtype.element_ty)
                tl.store(grad_value + block + (i * stride + columns), dv, mask=i < remaining)
            else:
                u = _rows(value + block, place, remaining, v_s, BV)
            of_p += tl.dot(g, tl.trans(u))
        near = _decays(sums, sums, number, number, i > j)
        square = (line * chunks + chunk) * C * C
        tl.store(small + line * padded + token, tl.sum(tl.where(i == j, of_p, 0.0), 1))
        tl.store(_square(of_scores + square, place, place, C), (of_p * near).to(of_scores.dtype.element_ty))
        if DELTA:
            of_a *= near
            tl.store(_square(of_system + square, place, place, C), of_a.to(of_system.dtype.element_ty))
            tl.store(small + size + line * padded + token, total)

    @triton.jit
    def _gradients_kernel(
        query, key, value, grad, corrections, states, grad_states, solved, vectors, channel_sums, of_scores, of_system,
        small, grad_query, grad_key, grad_decay, grad_beta, length, batch, heads, per_key,
        q_s, q_b, q_a, k_s, k_b, k_a, v_s, v_b, v_h,
        K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Write the gradients of query, key, log-decays and beta of one chunk, row and head of keys, for BK of the K
        channels; ``grad_beta`` [K / BK, s, b, h], and ``grad_decay`` with decays per head, have the parts of these
        channels. Decays are exp(G_i - G_j): a factor exp(G_i) of q_i or k_i is in the gradients ``of_q`` and, without
        beta, ``left``, a factor exp(-G_j) of k_j in ``right``. Two passes over the heads of v, of query and of key, so
        that registers hold one of their gradients; between them ``grad_decay`` has the gradients of G by ``of_q``."""
        part, chunk, groups, chunks = tl.program_id(0), tl.program_id(1), heads // per_key, tl.num_programs(1)
        row, group, channel = tl.program_id(2) // groups, tl.program_id(2) % groups, part * BK
        place, padded, size, stride = tl.arange(0, C), chunks * C, batch * heads * chunks * C, batch * heads * K
        token, i, j = chunk * C + place, place[:, None], place[None, :]
        first, remaining = chunk.to(tl.int64) * C, length - chunk * C
        q_at = query + first * q_s + row.to(tl.int64) * q_b + group * q_a + channel
        k_at = key + first * k_s + row.to(tl.int64) * k_b + group * k_a + channel
        out = ((first * batch + row) * groups + group) * K + channel
        within = i * (batch * groups * K) + tl.arange(0, BK)[None, :]
        dq = tl.zeros((C, BK), tl.float32)
        for head in range(group * per_key, (group + 1) * per_key):
            line = (row * heads + head).to(tl.int64)
            matrix, square = ((line * chunks + chunk) * K + channel) * V, (line * chunks + chunk) * C * C
            vector, at = vectors + line * padded + token, (token * batch + row) * heads + head
            sums_at = channel_sums + first * stride + (row * heads + head) * K + channel
            sums, leaf, since = _from_middles(sums_at, place, remaining, stride, BK, CHANNELS)
            start = tl.load(vector + size)[:, None] * tl.exp(tl.minimum(sums, 0.0))
            g_at = grad + ((first * batch + row) * heads + head) * V
            of_q = start * _products(g_at, place, remaining, batch * heads * V, states + matrix, V, BK, BV, C)
            pairs, k = _square(of_scores + square, place, place, C), _rows(k_at, place, remaining, k_s, BK)
            of_q = _add_pairs(of_q, pairs, k, since, -since, leaf, sums_at, place, remaining, stride, BK, C, CHANNELS)
            dq += of_q + tl.load(small + line * padded + token)[:, None] * k
            of_q *= _rows(q_at, place, remaining, q_s, BK)
            if CHANNELS:
                rise_at = grad_decay + at[:, None].to(tl.int64) * K + channel + tl.arange(0, BK)[None, :]
                tl.store(rise_at, of_q, mask=i < remaining)
            else:
                tl.store(grad_decay + part * length * batch * heads + at, tl.sum(of_q, 1), mask=token < length)
        tl.store(grad_query + out + within, dq.to(grad_query.dtype.element_ty), mask=i < remaining)
        tl.debug_barrier()
        dk = tl.zeros((C, BK), tl.float32)
        for head in range(group * per_key, (group + 1) * per_key):
            line = (row * heads + head).to(tl.int64)
            matrix, square = ((line * chunks + chunk) * K + channel) * V, (line * chunks + chunk) * C * C
            vector, at = vectors + line * padded + token, (token * batch + row) * heads + head
            sums_at = channel_sums + first * stride + (row * heads + head) * K + channel
            sums, leaf, since = _from_middles(sums_at, place, remaining, stride, BK, CHANNELS)
            tokens, part_at = (line * padded + first) * V, part * length * batch * heads + at
            end, k = tl.load(vector + 2 * size)[:, None], _rows(k_at, place, remaining, k_s, BK)
            total = tl.load(vectors + size + line * padded + chunk * C + C - 1)
            if CHANNELS:
                last = tl.load(sums_at + (tl.minimum(C, remaining) - 1) * stride + tl.arange(0, BK))
                end *= tl.exp(tl.minimum(last[None, :] - sums, 0.0))
                total *= tl.exp(tl.minimum(last, 0.0))
                rise_at = grad_decay + at[:, None].to(tl.int64) * K + channel + tl.arange(0, BK)[None, :]
                rise = tl.load(rise_at, mask=i < remaining, other=0.0)
            else:
                rise = tl.load(grad_decay + part_at, mask=token < length, other=0.0)
            left, right = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
            of_total = tl.zeros((BK,), tl.float32)
            for block in tl.range(0, V, BV, num_stages=1):  # s and ds are operands of products and read here
                s = _rows(states + matrix + block, tl.arange(0, BK), BK, V, BV)
                ds = _rows(grad_states + matrix + block, tl.arange(0, BK), BK, V, BV)
                of_total += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
                if DELTA:
                    left = tl.dot(_rows(solved + tokens + block, place, C, V, BV), tl.trans(s), left)
                    u = _rows(corrections + tokens + block, place, C, V, BV)
                else:
                    u_at = value + first * v_s + row.to(tl.int64) * v_b + head * v_h
                    u = _rows(u_at + block, place, remaining, v_s, BV)
                right = tl.dot(u, tl.trans(ds), right)
            if DELTA:
                start = tl.load(vector + size)[:, None] * tl.exp(tl.minimum(sums, 0.0))
                left *= -start
                pairs, beta = _square(of_system + square, place, place, C), tl.load(vector + 3 * size)
                left = _add_pairs(
                    left, pairs, k, since, -since, leaf, sums_at, place, remaining, stride, BK, C, CHANNELS
                )
                in_value = tl.where(part == 0, tl.load(small + size + line * padded + token), 0.0)
                of_beta = tl.sum(k * left, 1)
                tl.store(grad_beta + part_at, in_value + of_beta, mask=token < length)
                left *= beta[:, None]
                rise += k * left if CHANNELS else beta * of_beta
                dk += left
            right *= end
            of_last = total * (of_total if CHANNELS else tl.sum(of_total))
            of_last += tl.sum(k * right, 0) if CHANNELS else tl.sum(tl.sum(k * right, 1))
            pairs, q = of_scores + square + i + j * C, _rows(q_at, place, remaining, q_s, BK)  # transposed
            right = _add_pairs(right, pairs, q, -since, since, leaf, sums_at, place, remaining, stride, BK, C, CHANNELS)
            if DELTA:
                pairs, scaled = of_system + square + i + j * C, (beta[:, None] * k).to(k.dtype)
                right = _add_pairs(
                    right, pairs, scaled, -since, since, leaf, sums_at, place, remaining, stride, BK, C, CHANNELS
                )
            rise -= k * right if CHANNELS else tl.sum(k * right, 1)
            dk += right + tl.load(small + line * padded + token)[:, None] * q
            if CHANNELS:  # g_j is part of G_i for i >= j
                tl.store(rise_at, tl.cumsum(rise, 0, reverse=True) + of_last[None, :], mask=i < remaining)
            else:
                decay = tl.cumsum(rise, 0, reverse=True) + of_last
                tl.store(grad_decay + part_at, decay, mask=token < length)
        tl.store(grad_key + out + within, dk.to(grad_key.dtype.element_ty), mask=i < remaining)
