"""The flash-attn package: FlashAttention 2 (``flash_attn``) and 3 for Hopper (``flash_attn_interface``).

Only this module imports these packages, when a kernel is built. They require a contiguous last dim only, so that
queries, keys and values need no copies, and return an output dense in the order of the queries' dims. Their public
functions cannot compute a key block's gradients from a merged log-sum-exp, so that only full sequences are supported.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from megatron.core.attention.kernels.base import FlashKernel, Request
from megatron.core.attention.window import Window
from megatron.core.config.errors import UserError
from megatron.core.extensions.flash_attn import INSTALL, MODULES


def supports(version: int, request: Request) -> str | None:
    """Return why flash-attn ``version`` (2 or 3) does not support ``request``; None if it does. Imports nothing."""
    if version not in request.flash_packages:
        return f"the package is not installed; install it: {INSTALL[version]}"
    if request.unusual_scores is not None:
        return request.unusual_scores
    if request.sink:
        return "the package gives no gradients by a log-sum-exp, which --softmax-type needs"
    if request.blocks:
        return "the package gives no gradients of a block of keys; take --cp-comm-type a2a"
    if version == 3 and request.capability != (9, 0):
        return "it is for Hopper (sm_90)"
    if not request.fits_flash:
        return "flash kernels take head dims that are multiples of 8 up to 256, bfloat16 or float16 on a GPU"
    return None


class FlashAttentionPackage(FlashKernel):
    """FlashAttention 2 or 3 of the package, on full sequences and packed documents. Imports the package; raises
    UserError with the install command if that fails."""

    def __init__(self, version: int, scale: float, *, deterministic: bool = False) -> None:
        """Import the package of ``version`` (2 or 3); UserError with the install command if that fails."""
        super().__init__(scale)
        self.deterministic = deterministic
        try:
            self.module = importlib.import_module(MODULES[version])
        except ImportError as error:
            raise UserError(
                f"--flash-attention-version {version}: the package cannot be imported ({error}); install it: "
                f"{INSTALL[version]}; or choose --attention-backend auto"
            ) from error

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, shape: tuple, window: Window) -> tuple[Tensor, Any]:
        """Run the package's function on query, key and value with ``shape`` and ``window`` as in
        :meth:`FlashKernel._flash`; return (output, None): the log-sum-exp is not available. Differentiable by the
        package's autograd."""
        options = {
            "softmax_scale": self.scale,
            "causal": window[1] == 0,
            "window_size": window,
            "deterministic": self.deterministic,
        }
        if shape[0] is None:
            result = self.module.flash_attn_func(query, key, value, **options)
        else:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            options |= dict(zip(names, shape, strict=True))
            result = self.module.flash_attn_varlen_func(query, key, value, **options)
        return result[0] if isinstance(result, tuple) else result, None  # early releases of version 3 return a pair
