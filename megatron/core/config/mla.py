"""Multi-latent attention (DeepSeek-V2): keys and values from a low-rank latent. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.ranges import Dim


@dataclass(kw_only=True)
class MlaConfig:
    """Multi-latent attention"""

    multi_latent_attention: bool = False
    """Attention over a low-rank latent of keys and values. Excludes --group-query-attention."""

    q_lora_rank: Dim | None = None
    """Rank of the queries' latent; left out, queries are projected directly."""

    kv_lora_rank: Dim = 32
    """Rank of the latent of keys and values."""

    qk_head_dim: Dim = 128
    """Channels per head of queries and keys without position."""

    qk_pos_emb_head_dim: Dim = 64
    """Channels per head of queries and keys that carry the rotary position."""

    v_head_dim: Dim = 128
    """Channels per head of values."""
