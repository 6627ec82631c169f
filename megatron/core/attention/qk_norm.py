"""Choice of the norms of queries and keys. Layers and descriptions ask here; layer specs only override. Torch-free."""

from __future__ import annotations

from typing import Literal

from megatron.core.description.model import Config

QKNorm = Literal["l2", "across_heads", "standard"]
"""L2 norm without weights, one norm over all heads, or a norm per head (latent attention: per latent)."""


def qk_norm(config: Config, *, is_filled: bool = False) -> QKNorm | None:
    """Return the norm that ``config`` gives queries and keys (latent attention: their latents); None for no norm.
    ``is_filled``: a layer spec fills the norm's slot, which enables it too."""
    if config.qk_l2_norm:
        return "l2"
    if not (config.qk_layernorm or is_filled):
        return None
    return "across_heads" if config.qk_layernorm_across_heads else "standard"
