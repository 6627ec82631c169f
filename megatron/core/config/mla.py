"""Multi-latent attention (DeepSeek-V2, section 2.1): ranks of latents, sizes of heads. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import Dim, NonNegativeFloat


@dataclass(kw_only=True)
class LatentAttentionConfig(OptionalGroup):
    """Multi-latent attention"""

    multi_latent_attention: bool = False
    """Multi-latent attention: low-rank queries, keys and values, with separate rotary channels (DeepSeek-V2 and V3)."""

    q_lora_rank: Dim | None = None
    """Rank of the query latent (DeepSeek-V3: 1536); default: queries are projected directly from the hidden states."""

    kv_lora_rank: Dim = 32
    """Rank of the joint key-value latent (DeepSeek-V3: 512). Required by --multi-latent-attention."""

    qk_head_dim: Dim = 128
    """Channels of a query or key head without rotary positions (nope)."""

    qk_pos_emb_head_dim: Dim = 64
    """Rotary channels of a query or key head (rope); all heads have the same rotary key channels."""

    v_head_dim: Dim = 128
    """Channels of a value head."""

    latent_norm_epsilon: NonNegativeFloat | None = None
    """Epsilon of the norms of latents; default: --norm-epsilon."""

    rope_type: Literal["rope", "yarn", "none"] | None = None
    """Rotary embedding of multi-latent attention: rope; yarn, which --rotary-scaling-factor extends; or none (Kimi
    Linear); default: yarn, equal to rope at factor 1."""

    mla_down_proj_fusion: bool = False
    """Use one weight and one GEMM for both down-projections."""
