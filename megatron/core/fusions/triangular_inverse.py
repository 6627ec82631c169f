"""Inverse of unit lower triangular matrices [C, C] within a Triton kernel (``linear_attention.py``): blocks of 16 rows
by elimination in fp32, in registers of one warp each; then products of all blocks at once merge pairs of blocks."""

from megatron.core.fusions.installed_triton import tl, triton

if triton is not None:

    @triton.jit
    def _inverse(lower, C: tl.constexpr):
        """Return T = (1 + A)^-1, A = ``lower``. Elimination solves T (1 + A) = 1 in blocks: column m of T, times row m
        of A, is subtracted from columns j < m. A merge of blocks of 16, then of 32: the lower left quarter of T is
        -T_11 A_10 T_00. Its products are in TF32: T in bf16 has a larger error, unless keys are nearly equal and
        beta is near 2. Products of only these blocks in fp32 take five times as long."""
        block, other = tl.arange(0, C // 16)[:, None, None, None], tl.arange(0, C // 16)[None, None, :, None]
        row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
        a = tl.sum(tl.where(block == other, tl.reshape(lower, (C // 16, 16, C // 16, 16)), 0.0), 2)
        t = tl.where(row == column, 1.0, a * 0.0)
        for m in tl.static_range(15, 0, -1):
            of_m = tl.sum(tl.where(column == m, t, 0.0), 2)
            t -= of_m[:, :, None] * tl.sum(tl.where(row == m, a, 0.0), 1)[:, None, :]
        t = tl.reshape(tl.where(block == other, t[:, :, None, :], 0.0), (C, C))
        apart = tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]
        for level in tl.static_range(4, 6):  # C = 2^6
            below = tl.where((apart >> level) == 1, lower, 0.0)
            t -= tl.dot(tl.dot(t, below), t)
        return t
