"""Sums over rows in fp32, for bias gradients.

    y[n] = sum_t x[t, n],  or  total[n] += that sum, without intermediate rounding

Torch's reduction over the first dim reaches a third of the memory bandwidth for many columns. Here each program sums a
block of rows, and the same kernel then sums the partial results, in a fixed order: same bits every run.

Legend: t rows, n columns."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.core.fusions.dispatch import ByDevice, kernels_serve, num_sms
from megatron.core.fusions.installed_triton import tl, triton

_ROWS, _COLUMNS, _NUM_WARPS = 32, 64, 8
"""Tile of a program: 4 KiB of 16-bit values, one 16-byte vector per thread."""
PROGRAMS_PER_SM = 8
FEW_TILES = 16
"""With at most this many row tiles, one program per column block sums all rows, without a second stage."""


class ColumnSum(Protocol):
    def __call__(self, x: Tensor, total: Tensor | None = None, /) -> Tensor:
        """Return the column sums [n] of ``x`` [t, n] in its dtype, or ``total`` [n] with the sums added in place."""


def column_sum_plain(x: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the column sums [n] of ``x`` [t, n] in its dtype, or ``total`` [n] with the sums, in its dtype, added in
    place. Torch operations, any device."""
    return x.sum(0) if total is None else total.add_(x.sum(0, dtype=total.dtype))


if triton is not None:

    @triton.jit
    def _sum_rows(
        x, sums, rows, width, ADDS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Sum STEPS times ROWS rows, COLUMNS columns per program, to row ``program_id(0)`` of ``sums``; ADDS adds."""
        part = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        within = column < width
        tile = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(STEPS):
            row = (part * STEPS + step) * ROWS + tl.arange(0, ROWS)
            inside = (row < rows)[:, None] & within[None, :]
            tile += tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        result = tl.sum(tile, axis=0)
        at = sums + part * width + column
        if ADDS:
            result += tl.load(at, mask=within, other=0.0).to(tl.float32)
        tl.store(at, result.to(sums.dtype.element_ty), mask=within)


def column_sum_triton(x: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the column sums [n] of ``x`` [t, n] in its dtype, or ``total`` [n] with the sums added in place. Sums are
    fp32 and rounded once, in one kernel for few rows, else two, in a fixed order. GPU only."""
    x = parts = x.contiguous()
    rows, width = x.shape
    tiles, blocks = triton.cdiv(rows, _ROWS), max(1, triton.cdiv(width, _COLUMNS))
    most = triton.cdiv(PROGRAMS_PER_SM * num_sms(x.device), blocks)
    if tiles > FEW_TILES:
        steps = triton.cdiv(tiles, most)
        parts = torch.empty(triton.cdiv(tiles, steps), width, dtype=torch.float32, device=x.device)
        _launch(x, parts, steps)
    out = x.new_empty(width) if total is None else total
    _launch(parts, out.view(1, width), triton.cdiv(len(parts), _ROWS), adds=total is not None)
    return out


def _launch(x: Tensor, sums: Tensor, steps: int, *, adds: bool = False) -> None:
    if sums.numel():
        _sum_rows[(len(sums), triton.cdiv(x.shape[1], _COLUMNS))](
            x, sums, *x.shape, ADDS=adds, STEPS=steps, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_NUM_WARPS
        )


def choose_column_sum(dtype: torch.dtype, enabled: bool = True) -> ColumnSum:
    """Return the implementation for values of ``dtype``; ``enabled`` False selects torch operations."""
    return ByDevice(column_sum_triton, column_sum_plain) if kernels_serve(dtype, enabled) else column_sum_plain
