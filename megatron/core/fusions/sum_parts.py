"""Sums of 16-bit tensors in fp32.

    out = total + part,     computed in fp32, in the dtype of ``out``, which may be ``total``
    sum_all(parts),         computed in fp32, in the dtype of the parts

Torch adds tensors of different dtypes element by element, with narrow loads and stores. The kernel reads and writes
vectors of adjacent elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

_ELEMENTS, _NUM_WARPS = 2048, 4
"""Elements per program: 16 per thread."""


def sum_parts_reference(total: Tensor, part: Tensor, out: Tensor) -> None:
    """Write ``total + part`` to ``out`` in torch operations; any strides and dtypes."""
    torch.add(total, part, out=out)


if triton is not None:

    @triton.jit
    def _sum_kernel(total, part, out, numel, ELEMENTS: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < numel
        added = tl.load(total + at, mask=inside, other=0.0) + tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, added.to(out.dtype.element_ty), mask=inside)


def sum_parts_triton(total: Tensor, part: Tensor, out: Tensor) -> None:
    """Write ``total + part``, summed in fp32, to ``out`` in its dtype; all contiguous (not checked)."""
    numel = total.numel()
    _sum_kernel[(triton.cdiv(numel, _ELEMENTS),)](total, part, out, numel, ELEMENTS=_ELEMENTS, num_warps=_NUM_WARPS)


def sum_parts(total: Tensor, part: Tensor, out: Tensor) -> None:
    """Write ``total + part``, rounded to the dtype of ``out``, to ``out``, which may be ``total``; equal shapes."""
    fits = total.is_cuda and total.dtype == torch.float32 and all(x.is_contiguous() for x in (total, part, out))
    add = sum_parts_triton if triton is not None and fits and part.dtype != torch.float64 else sum_parts_reference
    add(total, part, out)


MAX_ADDENDS = 8
"""Maximum number of parts of the kernel, which is compiled per number; more are summed by torch."""


def sum_all_reference(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the tensors in list order, accumulated in at least fp32, in their dtype. Any strides."""
    first = parts[0]
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)


if triton is not None:

    @triton.jit
    def _sum_all_kernel(parts, out, numel, ELEMENTS: tl.constexpr):
        """In list order in fp32, rounded once."""
        at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < numel
        total = tl.load(parts[0] + at, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(1, len(parts)):
            total += tl.load(parts[i] + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def sum_all_triton(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum, in list order in fp32, of two to eight contiguous parts of one shape and dtype (up to 32 bits), a
    new tensor in their dtype, rounded once. One kernel; nothing is checked."""
    out = torch.empty_like(parts[0])
    numel = out.numel()
    grid = (triton.cdiv(numel, _ELEMENTS),)
    _sum_all_kernel[grid](tuple(parts), out, numel, ELEMENTS=_ELEMENTS, num_warps=_NUM_WARPS)
    return out


def sum_all(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum, in list order, of tensors of one shape and dtype, accumulated in fp32 (fp64 for fp64) and rounded
    once: a new tensor, also for a single part."""
    first = parts[0]
    fits = first.is_cuda and first.dtype != torch.float64 and 2 <= len(parts) <= MAX_ADDENDS
    if triton is not None and fits and all(part.is_contiguous() for part in parts):
        return sum_all_triton(parts)
    return sum_all_reference(parts)
