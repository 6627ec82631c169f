"""Multi-latent attention (DeepSeek-V2, section 2.1): ranks of latents, sizes of heads. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.ranges import Dim


@dataclass(kw_only=True)
class LatentAttentionConfig:
    """Multi-latent attention"""

    multi_latent_attention: bool = False
    """Queries, keys and values of low rank, positions on channels of their own (DeepSeek-V2 and V3)."""

    q_lora_rank: Dim | None = None
    """Channels of the queries' latent (DeepSeek-V3: 1536); left out: queries come straight from the residual stream."""

    kv_lora_rank: Dim = 32
    """Channels of the latent that keys and values share (DeepSeek-V3: 512). Required by --multi-latent-attention."""

    qk_head_dim: Dim = 128
    """Channels of a query or key head that are not rotated."""

    qk_pos_emb_head_dim: Dim = 64
    """Rotated channels of a query or key head; the key's are the same for all heads."""

    v_head_dim: Dim = 128
    """Channels of a value head."""

    rope_type: Literal["rope", "yarn"] | None = None
    """Rotation of multi-latent attention: plain, or stretched by --rotary-scaling-factor; default: yarn, which the
    factor 1 leaves plain."""

    mla_down_proj_fusion: bool = False
    """One weight, and one GEMM, for both projections to the latents."""
