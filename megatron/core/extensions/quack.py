"""Grouped GEMMs of the package quack-kernels (github.com/Dao-AILab/quack; CuTe DSL, Hopper and newer), where it is
installed.

Weight gradients of experts alone: on an H200 its GEMM that adds into fp32 takes 2.2 ms for the two matrices of 128
experts of 768 x 2048 with 512 rows each, and 9.1 ms for those of 8 experts of 14336 x 4096 with 2048, our kernel 2.6
and 11.5. Its forward GEMMs are as fast as torch's. Seen with 0.6.5; the first call of each shape compiles for seconds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.core.extensions.installed import is_installed

_ALIGNED = 8
"""Elements of 16 bits by which rows are loaded."""


@functools.cache
def _gemm_add_inplace() -> Callable[..., None] | None:
    """The package's ``out += A @ B``; None where it is not installed, or not as it is known here."""
    if not is_installed("quack"):
        return None
    try:
        module: Any = importlib.import_module("quack.gemm_interface")
        return module.gemm_add_inplace
    except (ImportError, OSError, RuntimeError, AttributeError):  # built for another CUDA, or its interface has changed
        return None


def quack_serves(x: Tensor, *widths: int) -> bool:
    """Whether its weight gradients take rows ``x`` of these widths."""
    fits = x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and not any(width % _ALIGNED for width in widths)
    return fits and torch.cuda.get_device_capability(x.device)[0] == 9 and _gemm_add_inplace() is not None


def add_grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> None:
    """``total`` fp32 [g, o, i] += ``grad`` [r, o]^T ``x`` [r, i] over the rows of each group, which ``ends`` int32 [g]
    ends."""
    add = _gemm_add_inplace()
    assert add is not None
    add(grad.t(), x, total, cu_seqlens_k=pad(ends, (1, 0)), tuned=False)
