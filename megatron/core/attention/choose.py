"""Select a layer's attention kernel from a :class:`Request` (backend flag, dtype, head dim, GPU, mask) once, at build.

:func:`_candidates` lists the kernels for the requested backend, best first. Each kernel's file has a ``supports``
function that returns None or the reason for rejection; the first supported kernel is chosen."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron.core.attention.context_parallel.bands import bands_are_right
from megatron.core.attention.kernels import flash_attn, flash_attn_4, relative, torch_sdpa
from megatron.core.attention.kernels.base import SIXTEEN_BIT, FlashKernel, Form, Kernel, Request
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.sink import has_sink
from megatron.core.attention.window import Window
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.extensions.flash_attn import installed_versions

logger = logging.getLogger(__name__)

TITLES = {
    **torch_sdpa.TITLES,
    "unfused": "unfused torch operations",
    "triton": "Triton kernels for relative positions",
    "flash-attn 2": "flash-attn, FlashAttention 2",
    "flash-attn 3": "flash-attn, FlashAttention 3",
    "flash-attn 4": "flash-attn, FlashAttention 4",
}
UNEQUAL_HEADS = ("unfused", "torch", "math")
"""Kernels that support different key and value head dims on full sequences."""
_SUPPORTS: dict[str, Callable[[Request], str | None]] = {
    "cudnn": torch_sdpa.cudnn_supports,
    "flash": torch_sdpa.flash_supports,
    "efficient": torch_sdpa.efficient_supports,
    "math": lambda request: request.unusual_scores,
    "unfused": lambda request: None,
    "triton": relative.supports,
    "flash-attn 2": lambda request: flash_attn.supports(2, request),
    "flash-attn 3": lambda request: flash_attn.supports(3, request),
    "flash-attn 4": flash_attn_4.supports,
}


class KernelChoice(NamedTuple):
    """The name of the selected kernel and the reason; ``str`` gives both for the log."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{TITLES[self.kernel]} ({self.reason})"


def build_request(
    config: TransformerConfig,
    window: Window | None,
    form: Form = "whole",
    channels: int | None = None,
    *,
    biased: bool = False,
) -> Request:
    """Build the request of a layer of ``config`` with ``window`` on this machine. May import flash-attn 4, which takes
    seconds. ``channels``: head dim if not ``config.kv_channels``. ``biased``: scores get a bias by distance."""
    return Request(
        backend=str(config.attention_backend),
        dtype=config.params_dtype,
        channels=channels or config.kv_channels,
        capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        window=window,
        dropout=config.attention_dropout,
        deterministic=config.deterministic_mode or torch.are_deterministic_algorithms_enabled(),
        flash_version=config.flash_attention_version,
        flash_packages=tuple(
            version for version in installed_versions() if version != 4 or _version_4_is_usable(config)
        ),
        form=form,
        sink=has_sink(config),
        soft_cap=config.attn_logit_softcapping,
        cudnn_version=torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        biased=biased,
    )


def _version_4_is_usable(config: TransformerConfig) -> bool:
    """Return whether flash-attn 4 works. Imports it (takes seconds) only if it is a candidate."""
    may_be_chosen = config.attention_backend in ("auto", "flash") and not config.attention_dropout
    return torch.cuda.is_available() and may_be_chosen and flash_attn_4.is_usable()


def choose_kernel(request: Request) -> KernelChoice:
    """Return the best supported kernel; the reason lists rejected better ones. In this order: unfused if requested or
    with dropout; UserError for a flash version with ``fused``; without GPU and flash version SDPA, or unfused for key
    blocks, soft cap or bias; UserError for 32 or 64 bits with ``fused`` or ``flash``, or if none is supported. No
    device access."""
    if request.backend in ("unfused", "local"):
        return KernelChoice("unfused", f"--attention-backend {request.backend}")
    if request.dropout:
        reason = f"--attention-dropout {request.dropout:g}: kernels would draw masks that depend on the layout"
        return KernelChoice("unfused", reason)
    if request.flash_version is not None and request.backend == "fused":
        flag = f"--flash-attention-version {request.flash_version}"
        raise UserError(f"{flag} contradicts --attention-backend fused; give --attention-backend flash")
    if request.capability is None and request.flash_version is None:
        return KernelChoice("unfused" if request.blocks or request.unusual_scores else "torch", request.situation)
    if request.dtype not in SIXTEEN_BIT and request.backend in ("fused", "flash"):
        raise UserError(
            f"--attention-backend {request.backend} takes bfloat16 or float16, not {request.situation}; train with "
            "--bf16, or choose --attention-backend auto"
        )
    return _first_that_serves(request)


def _first_that_serves(request: Request) -> KernelChoice:
    """Return the first candidate kernel that supports ``request``. Its reason holds the requested version, the
    situation, the reasons against earlier candidates, and remarks. Raises UserError with all reasons and a fix if no
    candidate supports it."""
    remarks, flag, fix = [], f"--attention-backend {request.backend}", "choose --attention-backend auto"
    if request.flash_version is not None:
        flag, fix = f"--flash-attention-version {request.flash_version}", "remove the flag"
        remarks = [flag]
    refused: dict[str, str] = {}
    for name in _candidates(request):
        reason = _SUPPORTS[name](request)
        if reason is None:
            rejections = [f"not {TITLES[other]}: {why}" for other, why in refused.items()]
            return KernelChoice(name, "; ".join([*remarks, request.situation, *rejections, *_remarks(name, request)]))
        refused[name] = reason
    raise UserError(f"{flag}: {'; '.join(refused.values())} ({request.situation}); {fix}")


def _candidates(request: Request) -> Iterator[str]:
    """Yield candidate kernels, best first; checks no ``supports``. A requested flash-attn version is the only one,
    installed or not; ``auto`` with a bias: triton, unfused. Else each of these whose condition holds, in this order
    (*banded*: a window on full sequences, not on key blocks):

    - flash-attn 4, then 3: 16 bits, installed; 3 for ``flash`` only, 4 for ``flash`` and ``auto``
    - cudnn: 16 bits, not banded, ``fused``, or ``auto`` from sm_90 on
    - flash: 16 bits, banded or not ``fused``
    - efficient and math (with key blocks: unfused): ``auto`` or banded
    - unfused: ``auto`` with a soft cap, no key blocks"""
    if request.flash_version is not None:
        yield f"flash-attn {request.flash_version}"
        return
    assert request.capability is not None
    if request.biased and request.backend == "auto":
        yield from ("triton", "unfused")
        return
    banded = request.window is not None and not request.blocks
    if request.dtype in SIXTEEN_BIT:
        packages = {"flash": (4, 3), "auto": (4,)}.get(request.backend, ())
        yield from (f"flash-attn {version}" for version in packages if version in request.flash_packages)
        # SDPA passes a window to cuDNN only as a dense mask: s^2 memory and time
        if not banded and (request.backend == "fused" or request.capability >= (9, 0) and request.backend == "auto"):
            yield "cudnn"
        if request.backend != "fused" or banded:
            yield "flash"
    if request.backend == "auto" or banded:
        yield from ("unfused",) if request.blocks else ("efficient", "math")
    if request.backend == "auto" and request.soft_cap is not None and not request.blocks:
        yield "unfused"


def _remarks(name: str, request: Request) -> Iterator[str]:
    """Yield notes for the log about a selected flash-attn package: the speed of version 3 if not requested; for version
    4 the compile time, and with ``auto`` the length from which it runs and the kernel for shorter calls. Nothing for
    other kernels."""
    if name == "flash-attn 3" and request.flash_version is None:
        yield "installed, and twice as fast as FlashAttention 2"
    if name != "flash-attn 4":
        return
    if request.backend == "auto" and request.flash_version is None:
        length, other = flash_attn_4.MEASURED_LENGTH, choose_kernel(without_version_4(request)).kernel
        yield f"from {length} tokens on, else {TITLES[other]}"
    yield "kernels are compiled in the first iteration, about 6 s each"


def without_version_4(request: Request) -> Request:
    """Return ``request`` as if flash-attn-4 were not installed."""
    return replace(request, flash_packages=tuple(version for version in request.flash_packages if version != 4))


def build_kernel(
    request: Request, config: TransformerConfig, layer_number: int, scale: float
) -> tuple[KernelChoice, Kernel]:
    """Select and build the kernel of layer ``layer_number`` (from 1) with softmax scale ``scale``; return both.

    For a ring with a sliding window, first runs the GPU kernel on the ring's band tiles (once per process, head dim and
    dtype). If its results are wrong, logs a warning and returns ``UnfusedAttention``. Raises UserError as
    :func:`choose_kernel`."""
    choice = choose_kernel(request)
    has_bands = request.form == "ring" and request.window is not None and choice.kernel != "unfused"
    if has_bands and not _flash_bands_are_correct(choice.kernel, request.channels, request.dtype):
        reason = "this GPU's flash kernels are wrong on the bands of a ring with a sliding window"
        logger.warning("context parallelism: %s; using plain torch there (--cp-comm-type allgather is faster)", reason)
        choice = KernelChoice("unfused", reason)
    return choice, _build(choice, request, scale, config, layer_number)


def _build(
    choice: KernelChoice, request: Request, scale: float, config: TransformerConfig, layer_number: int
) -> Kernel:
    """Build the chosen kernel with softmax scale ``scale``; layer number and ``config`` set the options of the unfused
    kernel. If ``auto`` chose flash-attn 4, returns ``WhereFaster`` with a second kernel for the tiles where that one
    was measured to be faster. Imports flash-attn 2 or 3 if chosen; UserError if this fails."""
    name, deterministic = choice.kernel, request.deterministic
    if name == "unfused":
        return UnfusedAttention(
            scale,
            layer_scale=float(layer_number) if config.apply_query_key_layer_scaling else 1.0,
            softmax_in_fp32=config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling,
            soft_cap=config.attn_logit_softcapping,
        )
    if name == "triton":
        return relative.RelativeAttention(scale)
    if name == "flash-attn 4":
        kernel = flash_attn_4.FlashAttention4(scale, deterministic=deterministic)
        if request.backend != "auto" or request.flash_version is not None:
            return kernel
        plain = without_version_4(request)
        otherwise = _build(choose_kernel(plain), plain, scale, config, layer_number)
        assert isinstance(otherwise, FlashKernel)
        return flash_attn_4.WhereFaster(kernel, otherwise)
    if name.startswith("flash-attn"):
        return flash_attn.FlashAttentionPackage(int(name[-1]), scale, deterministic=deterministic)
    return torch_sdpa.TorchAttention(name, scale, by_name=config.attention_backend == "fused")


@functools.lru_cache(maxsize=16)
def _flash_bands_are_correct(name: str, channels: int, dtype: torch.dtype) -> bool:
    """Return whether kernel ``name`` computes a ring's band tiles correctly on the current GPU, with scale
    channels^-0.5: runs :func:`bands_are_right` once per arguments; cached."""
    scale = channels**-0.5
    kernel: FlashKernel = torch_sdpa.TorchAttention(name, scale)
    if name == "flash-attn 4":
        kernel = flash_attn_4.FlashAttention4(scale)
    return bands_are_right(kernel, scale, channels, dtype, torch.device("cuda"))
