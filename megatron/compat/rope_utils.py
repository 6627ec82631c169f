"""Names of ``megatron.core.models.common.embeddings.rope_utils``; programs import all, those that it imports too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)
NAMES_OF_PROGRAMS = (TYPE_CHECKING, Optional, parallel_state, TransformerConfig)


def _rotate_half(x: Tensor, rotary_interleaved: bool) -> Tensor:
    if not rotary_interleaved:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Rotate the first r channels of ``t`` [s, b, heads, d] by the angles ``freqs`` [s, b or 1, 1, r]."""
    rotated, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    if multi_latent_attention:
        rotated = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    cos, sin = ((function(freqs) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
    return torch.cat((rotated * cos + _rotate_half(rotated, rotary_interleaved) * sin, rest), dim=-1)
