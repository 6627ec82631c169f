"""Matrix product whose elements do not depend on the shape of the product: the same bits for a row in every batch, and
for a column in every shard of the weight.

    y = x W^T,    sum over K in P equal parts, added as a binary tree:  ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

A part is summed in ascending steps in fp32 (fp64 for fp64). Tensor-parallel ranks that split K hold subtrees, so that
adding their results as a tree gives the bits of one rank. GPUs use one Triton kernel with fixed tiles and no split-K;
CPUs use GEMMs of fixed size.

Legend: t rows, o output features, k summed features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

ROWS = 32
"""Rows and columns of a CPU block. A multiple of vector registers: CPU kernels compute the elements after the last full
vector by another function, so that callers of elementwise functions pad their rows to it."""
_TILE, _STEP = 64, 64
"""Rows and columns of a GPU tile, and elements of K per step."""


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of a power of two of ``parts``, added in neighboring pairs."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def _blocks(x: Tensor, parts: int) -> Tensor:
    """Return contiguous blocks [blocks, parts, ROWS, k / parts] of ``x`` [t, k], the last one padded with zeros."""
    padded = F.pad(x.to(accumulator_dtype(x.dtype)), (0, 0, 0, -len(x) % ROWS))
    return padded.view(-1, ROWS, parts, x.shape[1] // parts).transpose(1, 2).contiguous()


def product_plain(x: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
    """Return ``x`` [t, k] times ``weight`` [o, k] transposed, in at least fp32, by GEMMs of ROWS x ROWS elements."""
    total = x.new_empty((len(x), len(weight)), dtype=accumulator_dtype(x.dtype))
    columns = _blocks(weight, parts)
    for rows, out in zip(_blocks(x, parts), total.split(ROWS)):
        for column, target in zip(columns, out.split(ROWS, 1)):
            block = tree_sum([torch.mm(left, right.t()) for left, right in zip(rows, column)])
            target.copy_(block[: target.shape[0], : target.shape[1]])
    return total


if triton is not None:

    @triton.jit
    def _part(
        x, weight, row, column, rows, columns, part_k, part, row_x, row_w, TILE: tl.constexpr, STEP: tl.constexpr
    ):
        """Return the sum [TILE, TILE] over part ``part`` of K in steps of STEP, in fp32."""
        total = tl.zeros((TILE, TILE), tl.float32)
        for start in range(0, part_k, STEP):
            k = start + tl.arange(0, STEP)
            inside = (k < part_k)[None, :]
            at = (part * part_k + k)[None, :]
            left = tl.load(x + row[:, None] * row_x + at, mask=(row < rows)[:, None] & inside, other=0.0)
            right = tl.load(weight + column[:, None] * row_w + at, mask=(column < columns)[:, None] & inside, other=0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        return total

    @triton.jit
    def _two(x, weight, row, column, rows, columns, part_k, part, row_x, row_w, TILE: tl.constexpr, STEP: tl.constexpr):
        return _part(x, weight, row, column, rows, columns, part_k, part, row_x, row_w, TILE, STEP) + _part(
            x, weight, row, column, rows, columns, part_k, part + 1, row_x, row_w, TILE, STEP
        )

    @triton.jit
    def _four(
        x, weight, row, column, rows, columns, part_k, part, row_x, row_w, TILE: tl.constexpr, STEP: tl.constexpr
    ):
        return _two(x, weight, row, column, rows, columns, part_k, part, row_x, row_w, TILE, STEP) + _two(
            x, weight, row, column, rows, columns, part_k, part + 2, row_x, row_w, TILE, STEP
        )

    @triton.jit
    def _product_kernel(
        x, weight, out, rows, columns, part_k, row_x, row_w, PARTS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
    ):
        """Write one fp32 tile of the product. Only PARTS changes the order of sums."""
        row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
        if PARTS == 1:
            total = _part(x, weight, row, column, rows, columns, part_k, 0, row_x, row_w, TILE, STEP)
        elif PARTS == 2:
            total = _two(x, weight, row, column, rows, columns, part_k, 0, row_x, row_w, TILE, STEP)
        elif PARTS == 4:
            total = _four(x, weight, row, column, rows, columns, part_k, 0, row_x, row_w, TILE, STEP)
        else:
            total = _four(x, weight, row, column, rows, columns, part_k, 0, row_x, row_w, TILE, STEP)
            total += _four(x, weight, row, column, rows, columns, part_k, 4, row_x, row_w, TILE, STEP)
        at = out + row[:, None] * columns + column[None, :]
        tl.store(at, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


def product_triton(x: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
    """Return :func:`product_plain` in fp32 by one kernel; up to 8 ``parts``."""
    x, weight = x.contiguous(), weight.contiguous()
    (rows, width), columns = x.shape, len(weight)
    out = x.new_empty((rows, columns), dtype=torch.float32)
    _product_kernel[(triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))](
        x, weight, out, rows, columns, width // parts, width, width, PARTS=parts, TILE=_TILE, STEP=_STEP, num_warps=4
    )
    return out


def in_full_vectors(function: Callable[[Tensor], Tensor], x: Tensor, halves: int = 1) -> Tensor:
    """Return the elementwise ``function`` of ``x`` [..., f], or of ``x`` [..., 2 f] with two ``halves`` that it
    combines to [..., f]. Differentiable. On CPUs f is filled up to a multiple of ROWS, so that an element's bits do not
    depend on its place."""
    width = x.shape[-1] // halves
    missing = -width % ROWS
    if x.is_cuda or not missing:
        return function(x)
    filled = F.pad(x.unflatten(-1, (halves, width)), (0, missing)).flatten(-2)
    return function(filled)[..., :width]


def batch_invariant_product(x: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
    """Return ``x`` [t, k] times ``weight`` [o, k] transposed, [t, o], in fp32 (fp64 for fp64); not differentiable.

    ``parts`` must be 1, 2, 4 or 8 and divide k (asserted)."""
    assert parts in (1, 2, 4, 8) and x.shape[1] % parts == 0
    if not len(x):
        return x.new_empty((0, len(weight)), dtype=accumulator_dtype(x.dtype))
    kernel = x.is_cuda and x.dtype != torch.float64
    return (product_triton if kernel else product_plain)(x, weight, parts)
