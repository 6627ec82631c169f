"""Weight gradients of MoE experts, accumulated inside the grouped GEMM.

    total[g] += dY[rows of g]^T X[rows of g]        in fp32, rounded once to the dtype of ``total``

Torch's grouped GEMM rounds each product to 16 bits, and needs memory for all of them and a second pass that adds.
Experts with few rows are bound by the traffic of ``total``: this kernel reads and writes it once, and skips groups
without rows.

Legend: g groups, r rows, o output features, i input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

_OUT, _IN, _ROWS, _NUM_WARPS, _NUM_STAGES = 128, 256, 64, 8, 3
"""Tile of a program and rows per step: the best of five on an H200 (fc1 of 128 experts of 512 rows: 1.7 ms, of 8 of
2048: 7.6 ms; torch's grouped GEMM plus addition takes 2.3 and 9.8 ms)."""
_BAND = 8
"""Output tiles per band; a band runs together with all input tiles."""


def grouped_weight_gradient_reference(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add the products of all groups to ``total`` [g, o, i] in place, in its dtype, in torch operations, one group at a
    time; the host waits for ``ends``."""
    start = 0
    for end, total_oi in zip(ends.tolist(), total):
        total_oi += (grad[start:end].to(total.dtype).t() @ x[start:end].to(total.dtype))
        start = end


if triton is not None:

    @triton.jit
    def _grouped_weight_gradient(
        grad, x, ends, total, width_o, width_i, tiles_o, tiles_i, OUT: tl.constexpr, IN: tl.constexpr,
        ROWS: tl.constexpr, BAND: tl.constexpr,
    ):  # fmt: skip
        """Add OUT x IN elements of one group's dY^T X, summed over its rows in fp32, to ``total`` in place, rounded
        once; one program per group and tile. A group without rows is not touched; rows after its end are not read as
        values."""
        # concurrent tiles belong to one group and one band of BAND output tiles: their rows stay in the L2 cache
        group, tile = tl.program_id(0) // (tiles_o * tiles_i), tl.program_id(0) % (tiles_o * tiles_i)
        band = tile // (BAND * tiles_i) * BAND
        height = tl.minimum(tiles_o - band, BAND)
        tile = tile % (BAND * tiles_i)
        end = tl.load(ends + group)
        start = tl.load(ends + group - 1, mask=group > 0, other=0)
        out = (band + tile % height) * OUT + tl.arange(0, OUT)
        feature = (tile // height) * IN + tl.arange(0, IN)
        product = tl.zeros((OUT, IN), dtype=tl.float32)
        for first in range(start, end, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = (row < end)[:, None]  # rows after the end may be NaN: mask both factors
            row = row.to(tl.int64)[:, None]
            grad_ro = tl.load(grad + row * width_o + out[None, :], mask=inside & (out < width_o)[None, :], other=0.0)
            x_ri = tl.load(x + row * width_i + feature[None, :], mask=inside & (feature < width_i)[None, :], other=0.0)
            product = tl.dot(tl.trans(grad_ro), x_ri, product, input_precision="ieee")
        if end > start:
            at = total + group.to(tl.int64) * width_o * width_i + out[:, None] * width_i + feature[None, :]
            within = (out < width_o)[:, None] & (feature < width_i)[None, :]
            product += tl.load(at, mask=within, other=0.0).to(tl.float32)
            tl.store(at, product.to(total.dtype.element_ty), mask=within)


def grouped_weight_gradient_triton(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add ``grad`` [r, o]^T ``x`` [r, i] of each group of rows, by ``ends`` int32 [g], to the contiguous ``total`` [g,
    o, i] in place: fp32 sums, rounded once to the dtype of ``total``. One launch, no host sync. Groups without rows are
    not touched."""
    assert total.is_contiguous(), "the sum's elements lie one after the other"
    width_o, width_i = grad.shape[1], x.shape[1]
    tiles_o, tiles_i = triton.cdiv(width_o, _OUT), triton.cdiv(width_i, _IN)
    if len(x):
        _grouped_weight_gradient[(len(ends) * tiles_o * tiles_i,)](
            grad.contiguous(), x.contiguous(), ends, total, width_o, width_i, tiles_o, tiles_i, OUT=_OUT, IN=_IN,
            ROWS=_ROWS, BAND=_BAND, num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
        )  # fmt: skip


def add_grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add ``grad``^T ``x`` of each group to ``total`` [g, o, i] in place; ``grad`` [r, o], ``x`` [r, i], ``ends`` int32
    [g] (end rows). Without Triton, on CPUs, for fp32 inputs or a strided ``total``, torch operations that wait for
    ``ends``."""
    fits = triton is not None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    add = grouped_weight_gradient_triton if fits and total.is_contiguous() else grouped_weight_gradient_reference
    add(grad, x, ends, total)
