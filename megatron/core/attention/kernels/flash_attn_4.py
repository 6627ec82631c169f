"""FlashAttention 4, the package flash-attn-4 (``flash_attn.cute``), for Hopper and Blackwell.

Its kernels are compiled from Python on first call, about 6 seconds each: one for forward and three for backward, for
each of causal, full, banded and packed. Only this module imports the package, and only when a model is built on a
machine with a GPU.

``--attention-backend auto`` selects it where it was measured to be faster than cuDNN. H200, causal, bf16, 32 heads in 8
groups of 128 channels, forward / backward in TFLOP/s (FlashAttention 4 against cuDNN): 8192 tokens 577 / 515 against
538 / 467, 32768 tokens 628 / 591 against 596 / 532, but 4096 tokens 499 / 409 against 498 / 418."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.kernels.base import FlashKernel, Request
from megatron.core.attention.masks import Mask
from megatron.core.attention.tiles import Tile, full_tile
from megatron.core.attention.window import Window
from megatron.core.autograd_context import AutogradContext
from megatron.core.config.errors import UserError
from megatron.core.config.notices import notice
from megatron.core.extensions.flash_attn import INSTALL, MODULES, installed_versions

logger = logging.getLogger(__name__)

MEASURED_CHANNELS, MEASURED_LENGTH = 128, 8192
"""Head dim, and minimum tokens of a causal square, for which it was measured to be faster than cuDNN."""


def _interface() -> ModuleType:
    """Import and return the package's module of tensor functions (seconds the first time). Raises UserError with the
    install command if the import fails with any exception."""
    try:
        return importlib.import_module(MODULES[4])
    except Exception as error:  # a beta on top of other betas: incompatible versions raise errors of any type
        raise UserError(
            f"flash-attn-4 is installed, but cannot be imported ({error}); install it again: {INSTALL[4]}; or choose "
            "--attention-backend fused"
        ) from error


@functools.cache
def is_usable() -> bool:
    """Return whether the package is installed and can be imported (takes seconds; cached). Logs a notice if it is
    installed but the import fails. Installs a filter for a warning of its compiler."""
    # the compiler warns for every kernel that an argument unused here has an unknown type
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    try:
        return 4 in installed_versions() and _interface() is not None
    except UserError as error:
        notice(logger, "attention: %s", error)
        return False


def supports(request: Request) -> str | None:
    """Return why the package does not support ``request``; None if it does. Rejects in this order: GPUs other than
    sm_9x and sm_10x, a missing package, soft cap or bias, dtypes and head dims (sm_10x: none between 128 and 256), and,
    with ``auto`` and no requested version, everything except the measured cases (sm_90, head dim 128, no window, not
    deterministic). Lengths are not checked; sinks and key blocks pass."""
    if request.capability is None or request.capability[0] not in (9, 10):
        return "it is for Hopper and Blackwell (sm_90, sm_100)"
    if 4 not in request.flash_packages:
        return f"the package is not installed; install it: {INSTALL[4]}"
    if request.unusual_scores is not None:
        return request.unusual_scores
    if not request.fits_flash:
        return "it takes bfloat16 or float16 and head dims that are multiples of 8 up to 256"
    if request.capability[0] == 10 and 128 < request.channels < 256:
        return "on Blackwell it takes head dims up to 128, and 256"
    by_name = request.backend != "auto" or request.flash_version is not None
    if by_name:
        return None
    if request.capability != (9, 0) or request.channels != MEASURED_CHANNELS:
        return f"it was measured on sm_90 with head dim {MEASURED_CHANNELS}"
    if request.window is not None or request.deterministic:
        return "it was not measured with windows and deterministic gradients"
    return None


class _FlashAttention(torch.autograd.Function):
    """Autograd wrapper of the package's forward and backward functions; returns (out, lse), lse not differentiable."""

    @staticmethod
    def forward(
        ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, options: dict[str, object], deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the package's forward with ``options``; ``out`` of four dims is dense in the order [s,
        b, a, e]. Saves the inputs and both results; only ``out`` is differentiable."""
        out = None
        if query.dim() == 4:  # dense in the order [s, b, a, e], so that [s, b, a * e] is a view
            batch, length, heads, _ = query.shape
            out = query.new_empty((length, batch, heads, value.shape[-1])).transpose(0, 1)
        out, lse = _interface()._flash_attn_fwd(query, key, value, out=out, return_lse=True, **options)[:2]
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options, ctx.deterministic = options, deterministic
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # do not allocate a zero gradient for lse
        return out, lse

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        grads = _gradients([grad, query, key, value, out], lse, ctx.options, ctx.deterministic)
        return *grads, None, None


def _gradients(tensors: list[Tensor], lse: Tensor, options: dict[str, object], deterministic: bool) -> tuple:
    grad, query, key, value, out = tensors
    return _interface()._flash_attn_bwd(query, key, value, out, grad, lse, deterministic=deterministic, **options)


class FlashAttention4(FlashKernel):
    """flash-attn-4 for all sizes, bands, blocks and packed documents."""

    def __init__(self, scale: float, *, deterministic: bool = False) -> None:
        super().__init__(scale)
        self.deterministic = deterministic

    def _options(self, shape: tuple, window: Window) -> dict[str, Any]:
        """Return the package's keyword arguments: softmax scale, window sides (an unlimited side, -1, becomes None),
        and for packed tensors the bounds and longest segments of ``shape``."""
        left, right = (None if side < 0 else side for side in window)
        options = {"softmax_scale": self.scale, "window_size_left": left, "window_size_right": right}
        if shape[0] is None:
            return options
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return {**options, **dict(zip(names, shape, strict=True))}

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, shape: tuple, window: Window) -> tuple[Tensor, Tensor]:
        return _FlashAttention.apply(query, key, value, self._options(shape, window), self.deterministic)

    def _flash_backward(self, tensors: list[Tensor], lse: Tensor, shape: tuple, window: Window) -> tuple:
        return _gradients(tensors, lse, self._options(shape, window), self.deterministic)


class WhereFaster(FlashKernel):
    """flash-attn-4 for calls at least as large as the measured ones, another kernel for the rest; decided per call."""

    def __init__(self, fast: FlashAttention4, otherwise: FlashKernel) -> None:
        super().__init__(fast.scale)
        self.fast, self.otherwise = fast, otherwise

    def kernel_for(self, tile: Tile) -> FlashKernel:
        """Return the kernel for ``tile``: flash-attn-4 if the tile is full or a causal square and has no fewer visible
        pairs than a causal square of 8192 tokens, the smallest measured to be faster; else the other kernel."""
        if not (tile.is_full or tile.is_causal_square):
            return self.otherwise
        pairs = tile.num_queries * tile.num_keys // (1 if tile.is_full else 2)
        return self.fast if pairs >= MEASURED_LENGTH**2 // 2 else self.otherwise

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend full sequences with :meth:`kernel_for`; documents and dense masks always go to the other kernel."""
        kernel = self.kernel_for(full_tile(len(query), len(key), mask.visibility))
        if mask.documents is not None or mask.hidden is not None:
            kernel = self.otherwise
        return kernel.attend(query, key, value, mask)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        return self.kernel_for(tile).forward(query, key, value, tile)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernel_for(tile).backward(grad, query, key, value, out, lse, tile)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, shape: tuple, window: Window) -> tuple[Tensor, Tensor]:
        return self.otherwise._flash(query, key, value, shape, window)

    def _flash_backward(self, tensors: list[Tensor], lse: Tensor, shape: tuple, window: Window) -> tuple:
        return self.otherwise._flash_backward(tensors, lse, shape, window)
