"""Gradient of an embedding lookup, added in place to the accumulated gradient; only rows of occurring ids are touched.

    total[v] += sum over tokens t with ids[t] = v of grad[t]

A dense gradient would be written, zeros included, and read again, although a micro-batch uses a few percent of the
vocabulary. The kernel gets the tokens sorted by id: the program of the first token of a run of equal ids sums the run
in token order, in fp32, and adds the sum once. No atomics: same bits every run.

Legend: t tokens, v rows of the table, h width."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.core.fusions.dispatch import ByDevice, kernels_serve
from megatron.core.fusions.installed_triton import tl, triton

ROWS, COLUMNS, NUM_WARPS = 8, 512, 4
"""Tile of a program. Most runs have one row; for repeated ids, ROWS rows are loaded at once."""


class AddRows(Protocol):
    def __call__(self, grad: Tensor, ids: Tensor, total: Tensor, /) -> None:
        """Add ``grad`` [t, h] to rows ``ids`` [t] of the contiguous ``total`` [v, h], of any float dtype, in place.
        Ignores negative ids; the others must be below v."""


def add_rows_plain(grad: Tensor, ids: Tensor, total: Tensor) -> None:
    """Add ``grad`` [t, h] to rows ``ids`` [t] of ``total`` [v, h] in place, ignoring negative ids. Torch operations: by
    a dense gradient of the table, in the dtype of ``grad``, on GPUs, where ``index_add_`` adds in random order; on CPUs
    row by row in the dtype of ``total``."""
    absent = ids < 0
    grad, ids = grad.masked_fill(absent.unsqueeze(-1), 0), ids.clamp(min=0)
    if grad.is_cuda:
        total.add_(torch.ops.aten.embedding_dense_backward(grad, ids, len(total), -1, False))
    else:
        total.index_add_(0, ids, grad.to(total.dtype))


if triton is not None:

    @triton.jit
    def _add_runs(
        grad, sorted_ids, order, ends, total, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """If a run of equal ids starts here, add the fp32 sum of its rows in token order to ``total``."""
        # one program per sorted token, though only the first of a run works: the number of runs needs a host sync
        first = tl.program_id(0)
        row = tl.load(sorted_ids + first).to(tl.int64)
        before = tl.load(sorted_ids + tl.maximum(first - 1, 0)).to(tl.int64)
        if (row >= 0) & ((first == 0) | (before != row)):
            end = tl.load(ends + first)
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            within = column < width
            sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            start = first
            while start < end:
                place = start + tl.arange(0, ROWS)
                token = tl.load(order + place, mask=place < end, other=0).to(tl.int64)
                inside = (place < end)[:, None] & within[None, :]
                at = token[:, None] * width + column[None, :]
                sums += tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
                start += ROWS
            in_total = total + row * width + column
            value = tl.load(in_total, mask=within, other=0.0).to(tl.float32) + tl.sum(sums, axis=0)
            tl.store(in_total, value.to(total.dtype.element_ty), mask=within)


def add_rows_triton(grad: Tensor, ids: Tensor, total: Tensor) -> None:
    """Add ``grad`` [t, h] to rows ``ids`` [t] of the contiguous ``total`` [v, h] in place, ignoring negative ids, with
    a sort of the ids and one kernel. Equal ids are summed in fp32 in token order and added once. No host sync."""
    assert total.is_contiguous(), "rows of the sum lie one after the other"
    width = grad.shape[-1]
    if not grad.numel():
        return
    sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)  # int32: half the radix passes of int64
    ends = torch.searchsorted(sorted_ids, sorted_ids, right=True, out_int32=True)
    _add_runs[(len(ids), triton.cdiv(width, COLUMNS))](
        grad.contiguous(), sorted_ids, order, ends, total, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS
    )


def choose_add_rows(dtype: torch.dtype) -> AddRows:
    """Return the implementation for gradients of ``dtype``."""
    return ByDevice(add_rows_triton, add_rows_plain) if kernels_serve(dtype) else add_rows_plain
