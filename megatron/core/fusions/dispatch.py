"""Selection between a Triton kernel and torch operations, made once when a module is built; strides of its inputs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def kernels_serve(dtype: torch.dtype, enabled: bool = True) -> bool:
    """Whether Triton kernels are used for ``dtype``: they are ``enabled``, Triton is installed, and a GPU exists.
    Kernels compute in fp32, so that fp64 uses torch."""
    installed = importlib.util.find_spec("triton") is not None
    return enabled and installed and dtype != torch.float64 and torch.cuda.is_available()


@dataclass(frozen=True)
class ByDevice:
    """Callable that selects ``kernel`` if its first argument is on a GPU and not fp64, else ``plain``: decided per
    call, because modules may move after they are built. Takes positional arguments only."""

    kernel: Callable[..., Any]
    plain: Callable[..., Any]

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        return (self.kernel if x.is_cuda and x.dtype != torch.float64 else self.plain)(x, *args)


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [s, b, ...] itself if consecutive tokens [s b] have equal distances in memory (:func:`row_stride`)
    and its last dim is contiguous, as parts of a projection do; else a contiguous copy."""
    even = 1 in x.shape[:2] or x.stride(0) == x.shape[1] * x.stride(1)
    return x if even and x.stride(-1) == 1 else x.contiguous()


def row_stride(x: torch.Tensor) -> int:
    """Return the distance of consecutive tokens of :func:`in_rows`. Strides of dims of size 1 mean nothing."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 2 for other devices (Triton's interpreter). Cached."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
