"""Triton kernels of linear recurrences with decays per channel of a key (Kimi delta attention, arXiv 2510.26692): the
kernels of ``linear_attention.py``, whose docstring has the formulas, that differ for them.

g, G, start and end have k elements. start and end multiply q and k before the scans, and the factors per head only tell
documents apart. D_ij is a factor inside of the sums over channels: exp(G_i - G_m) exp(G_m - G_j), m the middle of an
aligned block of 64, 16, 4 tokens or one that contains i and j. One product of matrices computes the pairs of all blocks
of a size, the largest for which no factor overflows. For the other pairs m is the middle of the smallest of the blocks
of 2, 4, .. 64 tokens that contain i and j: no exponent exceeds 0, and one product computes the pairs of all blocks of a
size.
"""

from megatron.core.fusions.installed_triton import tl, triton

if triton is not None:

    @triton.jit
    def _rows(base, place, remaining, stride, WIDTH: tl.constexpr):
        """Rows ``place`` of [s, WIDTH], whose offsets are 32 bits; zeros from ``remaining`` on."""
        at = base + (place[:, None] * stride + tl.arange(0, WIDTH)[None, :])
        return tl.load(at, mask=(place < remaining)[:, None], other=0.0)

    @triton.jit
    def _square(base, i, j, C: tl.constexpr):
        return base + i[:, None] * C + j[None, :]

    @triton.jit
    def _decays(sums_i, sums_j, begun_i, begun_j, visible):
        """exp(-|sums_i - sums_j|) for ``visible`` pairs of one document, else 0: the exponent is at most 0."""
        near = tl.exp(-tl.abs(sums_i[:, None] - sums_j[None, :]))
        return tl.where(visible & (begun_i[:, None] == begun_j[None, :]), near, 0.0)

    @triton.jit
    def _products(
        x, place, remaining, stride, matrix, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr
    ):
        """Return the products [C, BK] of rows ``x`` [s, V] and rows ``matrix`` [BK, V]."""
        total = tl.zeros((C, BK), tl.float32)
        for block in range(0, V, BV):
            other = _rows(matrix + block, tl.arange(0, BK), BK, V, BV)
            total = tl.dot(_rows(x + block, place, remaining, stride, BV), tl.trans(other), total)
        return total

    @triton.jit
    def _channel_decay_kernel(
        query, key, log_decay, sums, start_query, start_key, end_key, totals, length, batch, heads, per_key,
        q_s, q_b, q_a, k_s, k_b, k_a, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Write G, start q, start k and end k [s, b, h, k], without documents, and exp(G_last) to ``totals``
        [b, h, n, k]."""
        chunk, row, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
        place, channel, stride = tl.arange(0, C), tl.program_id(2) * BK, batch * heads * K
        first, remaining = chunk.to(tl.int64) * C, length - chunk * C
        at = first * stride + (row * heads + head) * K + channel
        decay = _rows(log_decay + at, place, remaining, stride, BK)
        q_at = query + first * q_s + row.to(tl.int64) * q_b + (head // per_key) * q_a + channel
        k_at = key + first * k_s + row.to(tl.int64) * k_b + (head // per_key) * k_a + channel
        q, k = _rows(q_at, place, remaining, q_s, BK), _rows(k_at, place, remaining, k_s, BK)
        total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        start, end = tl.exp(tl.minimum(total, 0.0)), tl.exp(tl.minimum(last[None, :] - total, 0.0))
        out, inside = at + (place[:, None] * stride + tl.arange(0, BK)[None, :]), (place < remaining)[:, None]
        tl.store(sums + out, total, mask=inside)
        tl.store(start_query + out, (start * q).to(k.dtype), mask=inside)
        tl.store(start_key + out, (start * k).to(k.dtype), mask=inside)
        tl.store(end_key + out, (end * k).to(k.dtype), mask=inside)
        line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + chunk
        tl.store(totals + line * K + channel + tl.arange(0, BK), tl.exp(tl.minimum(last, 0.0)))

    @triton.jit
    def _from_middle(sums_at, sums, place, level, remaining, stride, WIDTH: tl.constexpr):
        """G - G of the middle, per channel: the middle of a token's block of 2^level tokens begins its second half."""
        middle = (((place >> level) * 2 + 1) << level) >> 1
        return sums - _rows(sums_at, middle, remaining, stride, WIDTH)

    @triton.jit
    def _leaf(sums_at, sums, place, remaining, stride, WIDTH: tl.constexpr):
        """Return the level of the largest blocks (of 64, 16, 4 tokens or one) where no decay to or from the middle is
        beyond exp(-40), and G - G of the middle: exp(80) is in the range of bf16."""
        level = 6
        since = _from_middle(sums_at, sums, place, level, remaining, stride, WIDTH)
        while (level > 0) & (tl.max(tl.max(tl.abs(since), 1), 0) > 40.0):
            level -= 2
            since = _from_middle(sums_at, sums, place, level, remaining, stride, WIDTH)
        return level, since

    @triton.jit
    def _from_middles(sums_at, place, remaining, stride, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
        """Return G, then the level and the differences of :func:`_leaf`; with decays per head 0, all tokens and 0."""
        sums, level, since = 0.0, 6, 0.0
        if CHANNELS:
            sums = _rows(sums_at, place, remaining, stride, WIDTH)
            level, since = _leaf(sums_at, sums, place, remaining, stride, WIDTH)
        return sums, level, since

    @triton.jit
    def _channel_products(
        query, key, sums_at, place, remaining, q_s, k_s, stride, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr
    ):
        """Sums over channels of q_i k_j D_ij and of k_i k_j D_ij for j <= i."""
        i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        qk, kk = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        for block in range(0, K, BK):
            q, k = _rows(query + block, place, remaining, q_s, BK), _rows(key + block, place, remaining, k_s, BK)
            sums = _rows(sums_at + block, place, remaining, stride, BK)
            leaf, since = _leaf(sums_at + block, sums, place, remaining, stride, BK)
            near, k_far = tl.exp(since), (k * tl.exp(-since)).to(k.dtype)
            together = ((i ^ j) >> leaf) == 0
            qk += tl.where(together, tl.dot((q * near).to(k.dtype), tl.trans(k_far)), 0.0)
            kk += tl.where(together, tl.dot((k * near).to(k.dtype), tl.trans(k_far)), 0.0)
            for level in range(leaf, 6):  # C = 2^6
                near = tl.exp(-tl.abs(_from_middle(sums_at + block, sums, place, level + 1, remaining, stride, BK)))
                q_near, k_near = (q * near).to(k.dtype), (k * near).to(k.dtype)
                halves = ((i ^ j) >> level) == 1
                qk += tl.where(halves, tl.dot(q_near, tl.trans(k_near)), 0.0)
                kk += tl.where(halves, tl.dot(k_near, tl.trans(k_near)), 0.0)
        return qk, kk

    @triton.jit
    def _add_pairs(
        total, pairs, x, since, until, leaf, sums_at, place, remaining, stride,
        BK: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Add to ``total`` [C, BK] the product of the matrix at ``pairs`` [C, C], zero on one side of its diagonal, and
        ``x`` [C, BK]. CHANNELS: with the factors D per channel inside of the sum, exp(``since`` + ``until``) for pairs
        within a block of ``_leaf``."""
        matrix = tl.load(pairs)
        if not CHANNELS:
            total = tl.dot(matrix, x, total)
        elif leaf == 6:  # C = 2^6: all pairs
            total += tl.exp(since) * tl.dot(matrix, (x * tl.exp(until)).to(x.dtype))
        else:
            apart = place[:, None] ^ place[None, :]
            within = tl.where((apart >> leaf) == 0, matrix, 0.0).to(x.dtype)
            total += tl.exp(since) * tl.dot(within, (x * tl.exp(until)).to(x.dtype))
            sums = _rows(sums_at, place, remaining, stride, BK)
            for level in range(leaf, 6):
                near = tl.exp(-tl.abs(_from_middle(sums_at, sums, place, level + 1, remaining, stride, BK)))
                halves = tl.where((apart >> level) == 1, matrix, 0.0).to(x.dtype)
                total += near * tl.dot(halves, (x * near).to(x.dtype))
        return total
