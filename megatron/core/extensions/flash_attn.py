"""The flash-attn package: FlashAttention 2 (``flash_attn``) and 3 for Hopper (``flash_attn_interface``).

Tri Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024. Nothing else imports these packages, and this
module imports them only in :func:`load_flash_attention`. Both take tensors of any strides whose last dim is contiguous,
so that queries, keys and values need not be copied, and both give an output dense in the order of the queries' dims.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.config.errors import UserError
from megatron.core.extensions.installed import is_installed

if TYPE_CHECKING:
    from torch import Tensor

MODULES = {2: "flash_attn", 3: "flash_attn_interface"}
INSTALL = {
    2: "pip install flash-attn --no-build-isolation",
    3: "build hopper/ of github.com/Dao-AILab/flash-attention: python setup.py install",
}


def installed_versions() -> tuple[int, ...]:
    """Versions that can be imported, found without importing them."""
    return tuple(version for version, module in MODULES.items() if is_installed(module))


class FlashAttentionKernels(NamedTuple):
    """Attention of one version with everything chosen but the tensors."""

    dense_function: Callable[..., Any]
    packed_function: Callable[..., Any]
    options: dict[str, Any]

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [b, s, a, d], key and value [b, s, g, d] -> [b, s, a, d]."""
        return _output(self.dense_function(query, key, value, **self.options))

    def packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """query [t, a, d], key and value [t, g, d], documents one after the other -> [t, a, d].

        ``bounds`` int32 [documents + 1]: where each begins; none has more than ``longest`` tokens.
        """
        return _output(
            self.packed_function(
                query, key, value, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest,
                max_seqlen_k=longest, **self.options,
            )
        )  # fmt: skip


def _output(result: Any) -> Any:
    """Early releases of version 3 return the log-sum-exp beside the output."""
    return result[0] if isinstance(result, tuple) else result


def load_flash_attention(
    version: int, *, scale: float, causal: bool, window: tuple[int, int] | None, deterministic: bool
) -> FlashAttentionKernels:
    """The kernels of a version.

    Args:
        scale: factor of the scores.
        window: keys seen to the left and right of a query, -1 for all; None: no window.

    Raises:
        ValueError: the package cannot be imported, with the command that installs it.
    """
    try:
        module = importlib.import_module(MODULES[version])
    except ImportError as error:
        raise UserError(
            f"--flash-attention-version {version}: the package cannot be imported ({error}); install it: "
            f"{INSTALL[version]}; or choose --attention-backend auto"
        ) from error
    options = {
        "softmax_scale": scale, "causal": causal, "window_size": window or (-1, -1), "deterministic": deterministic
    }
    return FlashAttentionKernels(module.flash_attn_func, module.flash_attn_varlen_func, options)
