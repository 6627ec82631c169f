"""Which kernel computes attention: chosen once, from everything that the choice depends on, with the reason in words.

On Hopper cuDNN's kernels are 1.6 times as fast as FlashAttention 2, which torch's own flash kernels are, and about as
fast as FlashAttention 3. A chosen kernel is the only one that may run: where it cannot, the call fails and says why.
Two things are left to other kernels, call by call, since cuDNN is reported to get their gradients wrong
(``dot_product_attention.SDPAttention``): dense masks, and lengths that are no multiples of 128.

Legend: d head dim.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron.core.attention.window import Window, layer_window
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.extensions.flash_attn import INSTALL, installed_versions

Kernel = Literal["unfused", "torch", "cudnn", "flash", "efficient", "math", "flash-attn 2", "flash-attn 3"]

TITLES: dict[Kernel, str] = {
    "unfused": "unfused torch operations",
    "torch": "torch SDPA",
    "cudnn": "cuDNN through torch SDPA",
    "flash": "torch's flash kernel (FlashAttention 2)",
    "efficient": "torch's memory-efficient kernel",
    "math": "torch SDPA, matrix products",
    "flash-attn 2": "flash-attn, FlashAttention 2",
    "flash-attn 3": "flash-attn, FlashAttention 3",
}
SDPA_BACKENDS: dict[Kernel, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    """A kernel and why."""

    kernel: Kernel
    reason: str

    def __str__(self) -> str:
        return f"{TITLES[self.kernel]} ({self.reason})"


@dataclass(frozen=True)
class Request:
    """Everything that the choice depends on."""

    backend: str
    """``--attention-backend``."""
    dtype: torch.dtype
    channels: int
    """Head dim."""
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None: there is none."""
    window: Window | None = None
    dropout: float = 0.0
    deterministic: bool = False
    flash_version: int | None = None
    """``--flash-attention-version``."""
    flash_packages: tuple[int, ...] = ()
    """Versions of flash-attn that are installed."""

    @property
    def situation(self) -> str:
        """``sm_90, bfloat16, head dim 128``."""
        where = "no GPU" if self.capability is None else "sm_{}{}".format(*self.capability)
        words = [where, str(self.dtype).removeprefix("torch."), f"head dim {self.channels}"]
        words += [] if self.window is None else ["window {},{}".format(*self.window)]
        return ", ".join(words + (["deterministic"] if self.deterministic else []))


def request_of(config: TransformerConfig, layer_number: int) -> Request:
    """What a layer (from 1) of a configuration asks for on this machine."""
    assert config.kv_channels is not None
    return Request(
        backend=str(config.attention_backend),
        dtype=config.params_dtype,
        channels=config.kv_channels,
        capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        window=layer_window(config.window_size, config.window_attn_skip_freq, layer_number),
        dropout=config.attention_dropout,
        deterministic=config.deterministic_mode or torch.are_deterministic_algorithms_enabled(),
        flash_version=config.flash_attention_version,
        flash_packages=installed_versions(),
    )


def choose_kernel(request: Request) -> Choice:
    """The kernel of a layer.

    Raises:
        ValueError: what was asked for by name cannot serve, with the reason.
    """
    if request.backend in ("unfused", "local"):
        return Choice("unfused", f"--attention-backend {request.backend}")
    if request.dropout:
        reason = f"--attention-dropout {request.dropout:g}: kernels would draw masks that depend on the layout"
        return Choice("unfused", reason)
    if request.flash_version is not None:
        return _flash_package(request, request.flash_version)
    if request.capability is None:
        return Choice("torch", request.situation)
    if request.dtype not in SIXTEEN_BIT:
        return _wide(request)
    if request.window is not None:  # SDPA would need a mask of the whole sequence: s^2 memory and time
        return _windowed(request)
    return {"fused": _cudnn_or_refuse, "flash": _flash}.get(request.backend, _fastest)(request)


def _flash_package(request: Request, version: int) -> Choice:
    flag = f"--flash-attention-version {version}"
    if request.backend == "fused":
        raise UserError(f"{flag} contradicts --attention-backend fused; give --attention-backend flash")
    if version not in request.flash_packages:
        raise UserError(f"{flag}: the package is not installed; install it: {INSTALL.get(version, 'see its pages')}")
    if request.capability is None or request.dtype not in SIXTEEN_BIT:
        raise UserError(f"{flag} takes bfloat16 or float16 on a GPU, not {request.situation}; leave the flag out")
    if version == 3 and request.capability != (9, 0):
        raise UserError(f"{flag} is for Hopper (sm_90), not {request.situation}; leave the flag out")
    _check_flash_heads(request, flag)
    return Choice("flash-attn 3" if version == 3 else "flash-attn 2", f"{flag}; {request.situation}")


def _wide(request: Request) -> Choice:
    """float32 and float64 on a GPU."""
    if request.backend in ("fused", "flash"):
        raise UserError(
            f"--attention-backend {request.backend} takes bfloat16 or float16, not {request.situation}; train with "
            "--bf16, or choose --attention-backend auto"
        )
    return Choice("efficient" if _efficient_takes(request) else "math", request.situation)


def _windowed(request: Request) -> Choice:
    if not _flash_takes(request):
        kernel: Kernel = "efficient" if _efficient_takes(request) else "math"
        return Choice(kernel, f"{request.situation}: no flash kernel takes such heads")
    return _flash(request)


def _cudnn_or_refuse(request: Request) -> Choice:
    if reason := _cudnn_refuses(request):
        raise UserError(f"--attention-backend fused: {reason} ({request.situation}); choose --attention-backend auto")
    return Choice("cudnn", request.situation)


def _flash(request: Request) -> Choice:
    _check_flash_heads(request, f"--attention-backend {request.backend}")
    if request.backend == "flash" and 3 in request.flash_packages and request.capability == (9, 0):
        return Choice("flash-attn 3", f"{request.situation}; installed, and twice as fast as FlashAttention 2")
    return Choice("flash", request.situation)


def _fastest(request: Request) -> Choice:
    assert request.capability is not None
    if request.capability >= (9, 0):
        refused = _cudnn_refuses(request)
        if not refused:
            return Choice("cudnn", request.situation)
        return Choice(_without_cudnn(request), f"{request.situation}: {refused}")
    return Choice(_without_cudnn(request), request.situation)


def _without_cudnn(request: Request) -> Kernel:
    return "flash" if _flash_takes(request) else "efficient" if _efficient_takes(request) else "math"


def _efficient_takes(request: Request) -> bool:
    """Rows of heads are read in pieces of 16 bytes."""
    return request.dtype != torch.float64 and request.channels * request.dtype.itemsize % 16 == 0


def _cudnn_refuses(request: Request) -> str:
    """Why cuDNN cannot train with such heads; empty where it can."""
    assert request.capability is not None
    if request.deterministic:
        return "cuDNN's backward pass does not repeat its bits"
    if request.capability < (8, 0):
        return "cuDNN's attention needs sm_80"
    if request.channels % 8 or request.channels > 128:
        return "cuDNN's backward pass takes head dims that are multiples of 8 up to 128"
    return ""


def _flash_takes(request: Request) -> bool:
    assert request.capability is not None
    return request.capability >= (8, 0) and request.channels % 8 == 0 and request.channels <= 256


def _check_flash_heads(request: Request, flag: str) -> None:
    if not _flash_takes(request):
        raise UserError(
            f"{flag}: flash kernels take head dims that are multiples of 8 up to 256 from sm_80 on, not "
            f"{request.situation}; choose --attention-backend auto"
        )


def refusal(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> UserError:
    """Why torch says that a kernel cannot take these tensors [b, a, s, d]."""
    ask = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }.get(kernel)
    reasons: list[str] = []
    if ask is not None:
        grouped = query.shape[1] != key.shape[1]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ask(torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, grouped), debug=True)
        reasons = [str(warning.message).split(" (Triggered internally")[0] for warning in caught]
    shapes = f"query {list(query.shape)}, key and value {list(key.shape)}, {query.dtype}"
    return UserError(
        f"attention: {TITLES[kernel]} was chosen but does not take {shapes}: "
        f"{' '.join(reasons) or 'torch gives no reason'}; choose another --attention-backend"
    )
