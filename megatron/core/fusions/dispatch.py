"""Which form of an operation runs: a Triton kernel, or plain torch. Asked once, when a module is built."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def kernels_serve(dtype: torch.dtype, wanted: bool = True) -> bool:
    """Whether Triton kernels compute values of ``dtype``: they are wanted, installed, and there is a GPU.

    Kernels compute in fp32, so that fp64 stays with torch.
    """
    installed = importlib.util.find_spec("triton") is not None
    return wanted and installed and dtype != torch.float64 and torch.cuda.is_available()


@dataclass(frozen=True)
class ByDevice:
    """``kernel`` for a first argument on a GPU, ``plain`` for one in host memory or in fp64: modules may be moved after
    they are built."""

    kernel: Callable[..., Any]
    plain: Callable[..., Any]

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        return (self.kernel if x.is_cuda and x.dtype != torch.float64 else self.plain)(x, *args)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of SMs of a GPU; 2 elsewhere, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
