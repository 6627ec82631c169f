"""Matrix product whose elements do not depend on the shape of the product: the same bits for a row in every batch, and
for a column in every shard of the weight.

    y = x W^T,    sum over K in P equal parts, added as a binary tree:  ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

A part is summed in ascending steps in fp32 (fp64 for fp64). Tensor-parallel ranks that split K hold subtrees, so that
adding their results as a tree gives the bits of one rank. CPUs use GEMMs of fixed size. The kernels of GPUs add over K
in the same order, so that the choice by the number of rows changes no bit (measured on Hopper):

    few rows, other sizes      tiles of 64 x 64, partial sums in registers
    many rows, parts > 1       tiles of 128 x 128 read by the bulk copy engine, partial sums of 2 and 4 parts in memory
    many rows, parts = 1       cuBLASLt without split-K, for shapes where its bits equal the kernels above

Legend: t rows, o output features, k summed features."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

logger = logging.getLogger(__name__)

ROWS = 32
"""Rows and columns of a CPU block. A multiple of vector registers: CPU kernels compute the elements after the last full
vector by another function, so that callers of elementwise functions pad their rows to it."""
_TILE, _STEP = 64, 64
"""Rows and columns of a GPU tile for few rows, and elements of K per step."""
_LARGE_TILE, _TILES_OF_A_GROUP = 128, 8
"""Rows and columns of a GPU tile for many rows, and row tiles whose programs follow each other, for the L2 cache."""


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
        """Return the fp32 sum [TILE, TILE] over part ``part`` of K in steps of STEP."""
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
        """Only PARTS changes the order of sums."""
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
        tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])

    @triton.jit
    def _described_part(x, weight, row, column, part_k, part, TILE: tl.constexpr, STEP: tl.constexpr):
        total = tl.zeros((TILE, TILE), tl.float32)
        for start in range(part * part_k, (part + 1) * part_k, STEP):
            total = tl.dot(x.load([row, start]), weight.load([column, start]).T, total, input_precision="ieee")
        return total

    @triton.jit
    def _large_product_kernel(
        x, weight, out, pairs, fours, rows, columns, part_k,
        PARTS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    ):  # fmt: skip
        """Sums of 2 or 4 parts that wait for their neighbors are in ``pairs`` and ``fours`` [rows, columns] fp32: in
        registers they would leave none for tiles."""
        program, row_tiles, column_tiles = tl.program_id(0), tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
        first = program // (GROUP * column_tiles) * GROUP
        group = min(row_tiles - first, GROUP)
        inside = program % (GROUP * column_tiles)
        row, column = (first + inside % group) * TILE, (inside // group) * TILE
        row_t, column_t = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
        at = row_t.to(tl.int64)[:, None] * columns + column_t[None, :]
        mask = (row_t < rows)[:, None] & (column_t < columns)[None, :]
        if PARTS == 1:
            total = _described_part(x, weight, row, column, part_k, 0, TILE, STEP)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
        else:
            for pair in range(0, PARTS // 2):
                total = _described_part(x, weight, row, column, part_k, 2 * pair, TILE, STEP)
                total += _described_part(x, weight, row, column, part_k, 2 * pair + 1, TILE, STEP)
                if pair % 2 == 1:
                    total = tl.load(pairs + at, mask=mask) + total
                    if pair == 3:
                        total = tl.load(fours + at, mask=mask) + total
                if pair == PARTS // 2 - 1:
                    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
                elif pair % 2 == 0:
                    tl.store(pairs + at, total, mask=mask)
                else:
                    tl.store(fours + at, total, mask=mask)


def product_triton(x: Tensor, weight: Tensor, parts: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return :func:`product_plain`, rounded to ``dtype``, by one kernel; up to 8 ``parts``."""
    x, weight = x.contiguous(), weight.contiguous()
    (rows, width), columns = x.shape, len(weight)
    out = x.new_empty((rows, columns), dtype=dtype)
    _product_kernel[(triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))](
        x, weight, out, rows, columns, width // parts, width, width, PARTS=parts, TILE=_TILE, STEP=_STEP, num_warps=4
    )
    return out


def product_large(x: Tensor, weight: Tensor, parts: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return :func:`product_triton` by tiles for many rows; a part of K must be a multiple of 64 elements."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, weight = x.contiguous(), weight.contiguous()
    (rows, width), columns = x.shape, len(weight)
    out = x.new_empty((rows, columns), dtype=dtype)
    waiting = x.new_empty((parts.bit_length() - 2, rows, columns), dtype=torch.float32) if parts > 2 else [out]
    _large_product_kernel[(triton.cdiv(rows, _LARGE_TILE) * triton.cdiv(columns, _LARGE_TILE),)](
        *(TensorDescriptor.from_tensor(matrix, [_LARGE_TILE, _STEP]) for matrix in (x, weight)),
        out, waiting[0], waiting[-1], rows, columns, width // parts,
        PARTS=parts, TILE=_LARGE_TILE, STEP=_STEP, GROUP=_TILES_OF_A_GROUP, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


@contextmanager
def _cublaslt_without_split_k() -> Iterator[None]:
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [(getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)) for name in names]
    for name in names:
        setattr(matmul, name, (False, False))
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        for name, value in zip(names, before):
            setattr(matmul, name, value)


_AGREES: dict[object, bool] = {}
"""Whether cuBLASLt gave the kernels' bits, by shapes, dtypes and device."""
_COMPARED = 64
"""Rows at the start, in the middle and at the end of a product that are compared."""


def product_cublas(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return :func:`product_large` by cuBLASLt if it adds in the same order. Rows of the first product of a shape are
    compared with the kernel's, which serves shapes that differ, and CUDA graphs of shapes that were not compared."""
    key = (x.shape, weight.shape, x.dtype, dtype, x.device)
    if not _AGREES.get(key, not torch.cuda.is_current_stream_capturing()):
        return product_large(x, weight, 1, dtype)
    with _cublaslt_without_split_k():
        product = torch.mm(x, weight.t()) if dtype == x.dtype else torch.mm(x, weight.t(), out_dtype=dtype)
    if key not in _AGREES:
        starts = {0, (len(x) - _COMPARED) // 2, len(x) - _COMPARED}
        rows = torch.cat([torch.arange(start, start + _COMPARED, device=x.device) for start in starts])
        _AGREES[key] = torch.equal(product[rows], product_triton(x[rows], weight, 1, dtype))
        if not _AGREES[key]:
            logger.warning(f"cuBLAS adds {tuple(x.shape)} x {tuple(weight.t().shape)} in another order: using Triton")
            return product_large(x, weight, 1, dtype)
    return product


def in_full_vectors(function: Callable[[Tensor], Tensor], x: Tensor, halves: int = 1) -> Tensor:
    """Apply the elementwise ``function`` to ``x`` [..., f]; with two ``halves`` to ``x`` [..., 2 f], which it combines
    to [..., f]. Differentiable. On CPUs f is padded to a multiple of ROWS: bits must not depend on the place."""
    width = x.shape[-1] // halves
    missing = -width % ROWS
    if x.is_cuda or not missing:
        return function(x)
    filled = F.pad(x.unflatten(-1, (halves, width)), (0, missing)).flatten(-2)
    return function(filled)[..., :width]


def batch_invariant_product(x: Tensor, weight: Tensor, parts: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x`` [t, k] times ``weight`` [o, k] transposed, [t, o], rounded to ``dtype`` (None: not rounded, fp32, or
    fp64 for fp64); not differentiable. ``parts`` must be 1, 2, 4 or 8 and divide k (asserted)."""
    assert parts in (1, 2, 4, 8) and x.shape[1] % parts == 0
    dtype = dtype or accumulator_dtype(x.dtype)
    if not len(x):
        return x.new_empty((0, len(weight)), dtype=dtype)
    if not x.is_cuda or x.dtype == torch.float64:
        return product_plain(x, weight, parts).to(dtype)
    if not _has_large_tiles(x, weight, parts):
        return product_triton(x, weight, parts, dtype)
    return product_large(x, weight, parts, dtype) if parts > 1 else product_cublas(x, weight, dtype)


def _has_large_tiles(x: Tensor, weight: Tensor, parts: int) -> bool:
    """bf16 or fp16 on Hopper, where their bits were compared."""
    if len(x) <= _TILE or x.dtype.itemsize != 2 or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    return x.shape[1] % (parts * _STEP) == 0 and len(weight) % 8 == 0
