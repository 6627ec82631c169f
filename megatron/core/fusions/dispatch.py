"""Selection between a Triton kernel and torch operations, made once when a module is built."""

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


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 2 for other devices (Triton's interpreter). Cached."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
