"""A part of a gradient, of 16 bits, added to a sum in fp32; the last one while the sum is rounded.

    out = total + part,    computed in fp32, in the dtype of ``out``, which may be ``total``

Torch's addition of mixed types casts element by element: its loads and stores are not wide. The kernel reads and writes
vectors of neighbouring elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_ELEMENTS, _NUM_WARPS = 2048, 4
"""Elements of a program: 16 per thread."""


def sum_parts_reference(total: Tensor, part: Tensor, out: Tensor) -> None:
    """Plain torch, any strides and dtypes."""
    torch.add(total, part, out=out)


if triton is not None:

    @triton.jit
    def _sum_kernel(total, part, out, numel, ELEMENTS: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < numel
        added = tl.load(total + at, mask=inside, other=0.0) + tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, added.to(out.dtype.element_ty), mask=inside)


def sum_parts_triton(total: Tensor, part: Tensor, out: Tensor) -> None:
    """``total`` fp32; all three contiguous."""
    numel = total.numel()
    _sum_kernel[(triton.cdiv(numel, _ELEMENTS),)](
        total, part, out, numel, ELEMENTS=_ELEMENTS, num_warps=_NUM_WARPS
    )


def sum_parts(total: Tensor, part: Tensor, out: Tensor) -> None:
    """``out`` becomes ``total + part``; all of one shape, ``out`` may be ``total``."""
    fits = total.is_cuda and total.dtype == torch.float32 and all(x.is_contiguous() for x in (total, part, out))
    add = sum_parts_triton if triton is not None and fits and part.dtype != torch.float64 else sum_parts_reference
    add(total, part, out)
