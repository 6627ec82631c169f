"""Batched matrix products with a symmetric result: C = alpha A B^T + beta D, half the FLOP of a GEMM.

Examples are Gram matrices (B = A), and products of polynomials of one symmetric matrix, which commute. The kernel
computes tiles on and below the diagonal and mirrors them. D must be symmetric; C is symmetric to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

# legend: k batch, m rows and columns of the result, n summed dim

_TILE, _DEPTH, _NUM_WARPS, _NUM_STAGES = 128, 64, 8, 3
"""Rows and columns of a tile, and elements along the summed dim per step."""


def symmetric_product_reference(
    a_kmn: Tensor, b_kmn: Tensor, add_kmm: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Return :func:`symmetric_product` by a full GEMM; symmetric up to rounding."""
    if add_kmm is None:
        product = a_kmn @ b_kmn.mT
        return product if alpha == 1.0 else alpha * product
    return torch.baddbmm(add_kmm, a_kmn, b_kmn.mT, beta=beta, alpha=alpha)


if triton is not None:

    @triton.jit
    def _product_kernel(
        a, b, add, out, m, n, alpha, beta,
        a_batch: tl.int64, a_row, a_column, b_batch: tl.int64, b_row, b_column,
        HAS_ADD: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """Write tile (i, j), j <= i, and its mirror image. ``add`` and ``out`` are contiguous."""
        tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
        i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
        # the root is rounded: correct i so that i (i + 1) / 2 <= tile < (i + 1) (i + 2) / 2
        i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
        i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
        j = tile - i * (i + 1) // 2
        rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        depth = tl.arange(0, DEPTH)
        a_at = a + batch * a_batch + rows[:, None].to(tl.int64) * a_row + depth[None, :].to(tl.int64) * a_column
        b_at = b + batch * b_batch + columns[None, :].to(tl.int64) * b_row + depth[:, None].to(tl.int64) * b_column
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        for start in range(0, n, DEPTH):
            inside = depth < n - start
            left = tl.load(a_at, mask=(rows < m)[:, None] & inside[None, :], other=0.0)
            right = tl.load(b_at, mask=(columns < m)[None, :] & inside[:, None], other=0.0)
            total = tl.dot(left, right, total)
            a_at += DEPTH * a_column
            b_at += DEPTH * b_column
        total *= alpha
        below = batch * m * m + rows[:, None].to(tl.int64) * m + columns[None, :]
        inside = (rows < m)[:, None] & (columns < m)[None, :]
        if HAS_ADD:
            total += beta * tl.load(add + below, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        # a tile on the diagonal writes and mirrors its lower half only: the halves may differ by rounding
        tl.store(out + below, rounded, mask=inside & (rows[:, None] >= columns[None, :]))
        above = batch * m * m + columns[None, :].to(tl.int64) * m + rows[:, None]
        tl.store(out + above, rounded, mask=inside & (rows[:, None] > columns[None, :]))


def symmetric_product_triton(
    a_kmn: Tensor, b_kmn: Tensor, add_kmm: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Return :func:`symmetric_product` by the kernel; 16-bit operands of any strides, summed in fp32 (not checked)."""
    k, m, n = a_kmn.shape
    out = a_kmn.new_empty(k, m, m)
    add = out if add_kmm is None else add_kmm.contiguous()
    tiles = triton.cdiv(m, _TILE)
    _product_kernel[(tiles * (tiles + 1) // 2, k)](
        a_kmn, b_kmn, add, out, m, n, alpha, beta, *a_kmn.stride(), *b_kmn.stride(), HAS_ADD=add_kmm is not None,
        TILE=_TILE, DEPTH=_DEPTH, num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
    )  # fmt: skip
    return out


def symmetric_product(
    a_kmn: Tensor, b_kmn: Tensor, add_kmm: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Return ``alpha a b^T + beta add`` [k, m, m], which must be symmetric (not checked), in the dtype of ``a_kmn``.
    ``add_kmm`` None: zero. Half the FLOP for 16-bit operands on GPUs, a full GEMM elsewhere."""
    fits = a_kmn.is_cuda and a_kmn.dtype in (torch.bfloat16, torch.float16)
    compute = symmetric_product_triton if triton is not None and fits else symmetric_product_reference
    return compute(a_kmn, b_kmn, add_kmm, alpha, beta)
