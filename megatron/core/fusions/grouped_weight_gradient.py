"""Weight gradients of MoE experts, accumulated inside the grouped GEMM.

    total[g] += dY[rows of g]^T X[rows of g]        in fp32, rounded once to the dtype of ``total``

Torch's grouped GEMM rounds each product to 16 bits, and needs memory for all of them and a second pass that adds.
Experts with few rows are bound by the traffic of ``total``: this kernel reads and writes it once, and skips groups
without rows. On Hopper and newer GPUs the tensor memory accelerator (TMA) loads the tiles and adds a fp32 product to
``total`` in the L2 cache, so that no program waits for it. Each element is added once per launch: same bits every run.

Legend: g groups, r rows, o output features, i input features."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

_OUT, _IN, _ROWS, _NUM_WARPS = 128, 256, 64, 8
"""Tile of a program and rows per step: the best of twenty on an H200 with TMA (fc1 and fc2 of 128 experts of 2048 x 768
with 512 rows each: 1.44 and 0.74 ms, 1.81 and 0.91 with loads by address; fc2 of 8 of 4096 x 14336 with 2048 rows: 3.5
and 4.6 ms)."""
_BAND, _BAND_FEW_ROWS, _FEW_ROWS = 8, 3, 1024
"""Output tiles per band; a band runs together with all input tiles. High bands reuse operands in the L2 cache. Groups
of fewer rows are bound by ``total``: a low band completes its rows sooner (fc1 above: 1.51 ms with 8, 1.61 with 16)."""


def grouped_weight_gradient_reference(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add the products of all groups to ``total`` [g, o, i] in place, in its dtype, in torch operations, one group at a
    time; the host waits for ``ends``."""
    start = 0
    for end, total_oi in zip(ends.tolist(), total):
        total_oi += grad[start:end].to(total.dtype).t() @ x[start:end].to(total.dtype)
        start = end


if triton is not None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def _grouped_weight_gradient(
        grad, x, ends, total, grad_tiles, x_tiles, total_tiles, width_o, width_i, tiles_o, tiles_i, OUT: tl.constexpr,
        IN: tl.constexpr, ROWS: tl.constexpr, BAND: tl.constexpr, LOADS_TILES: tl.constexpr, ADDS_TILES: tl.constexpr,
    ):  # fmt: skip
        """Add OUT x IN elements of one group's dY^T X, summed in fp32 and rounded once; one program per group and tile.
        Rows after a group's end are not read as values. LOADS_TILES and ADDS_TILES read and add by descriptors."""
        # concurrent tiles belong to one group and one band of BAND output tiles: their rows stay in the L2 cache
        group, tile = tl.program_id(0) // (tiles_o * tiles_i), tl.program_id(0) % (tiles_o * tiles_i)
        band = tile // (BAND * tiles_i) * BAND
        height = tl.minimum(tiles_o - band, BAND)
        tile = tile % (BAND * tiles_i)
        end = tl.load(ends + group)
        start = tl.load(ends + group - 1, mask=group > 0, other=0)
        first_o, first_i = (band + tile % height) * OUT, tile // height * IN
        out, feature = first_o + tl.arange(0, OUT), first_i + tl.arange(0, IN)
        product = tl.zeros((OUT, IN), dtype=tl.float32)
        rest = start
        if LOADS_TILES:
            rest += (end - start) // ROWS * ROWS
            for first in range(start, rest, ROWS):
                grad_ro, x_ri = grad_tiles.load([first, first_o]), x_tiles.load([first, first_i])
                product = tl.dot(tl.trans(grad_ro), x_ri, product, input_precision="ieee")
        for first in range(rest, end, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = (row < end)[:, None]  # rows after the end may be NaN: mask both factors
            row = row.to(tl.int64)[:, None]
            grad_ro = tl.load(grad + row * width_o + out[None, :], mask=inside & (out < width_o)[None, :], other=0.0)
            x_ri = tl.load(x + row * width_i + feature[None, :], mask=inside & (feature < width_i)[None, :], other=0.0)
            product = tl.dot(tl.trans(grad_ro), x_ri, product, input_precision="ieee")
        if end > start:
            if ADDS_TILES:
                total_tiles.atomic_add([group, first_o, first_i], tl.reshape(product, (1, OUT, IN)))
            else:
                at = total + group.to(tl.int64) * width_o * width_i + out[:, None] * width_i + feature[None, :]
                within = (out < width_o)[:, None] & (feature < width_i)[None, :]
                product += tl.load(at, mask=within, other=0.0).to(tl.float32)
                tl.store(at, product.to(total.dtype.element_ty), mask=within)


def _can_describe(x: Tensor) -> bool:
    """Whether TMA can access ``x``: multiples of 16 bytes, and Hopper or newer (or Triton's interpreter)."""
    aligned = x.data_ptr() % 16 == 0 and x.shape[-1] * x.element_size() % 16 == 0
    return aligned and (not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] >= 9)


def grouped_weight_gradient_triton(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add ``grad`` [r, o]^T ``x`` [r, i] of each group of rows, by ``ends`` int32 [g], to the contiguous ``total`` [g,
    o, i] in place: fp32 sums, rounded once to the dtype of ``total``. One launch, no host sync."""
    assert total.is_contiguous(), "the sum's elements lie one after the other"
    if not len(x):
        return
    grad, x = grad.contiguous(), x.contiguous()
    width_o, width_i = grad.shape[1], x.shape[1]
    tiles_o, tiles_i = triton.cdiv(width_o, _OUT), triton.cdiv(width_i, _IN)
    operands = (grad, x, total)
    loads = x.element_size() == 2 and all(map(_can_describe, operands))
    adds = loads and x.is_cuda and total.dtype == torch.float32  # the interpreter has no reduction by descriptor
    blocks = ([_ROWS, _OUT], [_ROWS, _IN], [1, _OUT, _IN])
    # where a descriptor is not read, the tensor takes its place
    tiles = [
        TensorDescriptor.from_tensor(operand, block) if by_descriptor else operand
        for operand, block, by_descriptor in zip(operands, blocks, (loads, loads, adds))
    ]
    band = _BAND_FEW_ROWS if len(x) < _FEW_ROWS * len(ends) else _BAND
    _grouped_weight_gradient[(len(ends) * tiles_o * tiles_i,)](
        grad, x, ends, total, *tiles, width_o, width_i, tiles_o, tiles_i, OUT=_OUT, IN=_IN, ROWS=_ROWS, BAND=band,
        LOADS_TILES=loads, ADDS_TILES=adds, num_warps=_NUM_WARPS, num_stages=4 if loads else 3,
    )  # fmt: skip


def add_grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add ``grad``^T ``x`` of each group to ``total`` [g, o, i] in place; ``grad`` [r, o], ``x`` [r, i], ``ends`` int32
    [g] (end rows). Without Triton, on CPUs, for fp32 inputs or a strided ``total``, torch waits for ``ends``."""
    fits = triton is not None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    add = grouped_weight_gradient_triton if fits and total.is_contiguous() else grouped_weight_gradient_reference
    add(grad, x, ends, total)
