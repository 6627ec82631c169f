"""Grouped GEMMs of quack-kernels (github.com/Dao-AILab/quack; CuTe DSL, Hopper and newer), an optional package.

Used only for weight gradients of experts. On an H200 its GEMM that accumulates in fp32 takes 2.2 ms for the two
matrices of 128 experts of 768 x 2048 with 512 rows each (Triton kernel: 2.2), and 9.1 ms for 8 experts of 14336 x 4096
with 2048 rows (11.5). Its forward GEMMs are as fast as torch's. Tested with 0.6.5; each shape's first call compiles for
seconds."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.core.extensions.installed import is_installed

_ALIGNED = 8
"""Required divisor of row widths: 16-bit elements per vector load."""


@functools.cache
def _gemm_add_inplace() -> Callable[..., None] | None:
    """Return the package's ``out += A @ B``; None if it is missing, broken or has another interface. Cached."""
    if not is_installed("quack"):
        return None
    try:
        return importlib.import_module("quack.gemm_interface").gemm_add_inplace
    except (ImportError, OSError, RuntimeError, AttributeError):  # built for another CUDA, or its interface has changed
        return None


def quack_serves(x: Tensor, *widths: int) -> bool:
    """Return whether the package supports weight gradients with rows ``x`` of these widths: bf16 on Hopper."""
    fits = x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and not any(width % _ALIGNED for width in widths)
    return fits and torch.cuda.get_device_capability(x.device)[0] == 9 and _gemm_add_inplace() is not None


def add_grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add ``grad`` [r, o]^T ``x`` [r, i] over each group's rows to ``total`` fp32 [g, o, i] in place; ``ends`` int32
    [g] are the end rows of groups."""
    add = _gemm_add_inplace()
    assert add is not None
    add(grad.t(), x, total, cu_seqlens_k=pad(ends, (1, 0)), tuned=False)
