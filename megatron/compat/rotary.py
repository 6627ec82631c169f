"""Rotary position embeddings for programs that compute them in their layers.

A table of angles is [s, 1, 1, d]: of position i and frequency j the angle i * base^(-2j/d), for both halves of a head
(or for neighbors, with ``rotary_interleaved``). Layers of this library use ``attention/rotary.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.compat.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.attention.rotary import Llama3Scaling
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import AnyGroup
from megatron.core.parallel_state import resolve_group


def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: AnyGroup = None) -> Tensor:
    """Return this context-parallel rank's positions of a table, along ``seq_dim``."""
    return TokenLayout(resolve_group(cp_group, "cp")).local(pos_emb, seq_dim)


class RotaryEmbedding(nn.Module):
    """Tables of angles; the arguments are Megatron-LM's."""

    inv_freq: Tensor

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        **options: Any,
    ) -> None:
        """Compute the frequencies fp32 [d / 2] of the first ``kv_channels * rotary_percent`` channels, with LLaMA 3's
        scaling if ``rope_scaling``. ``options`` may hold ``use_cpu_initialization`` (ignored) and ``cp_group``."""
        super().__init__()
        if unknown := options.keys() - {"use_cpu_initialization", "cp_group"}:
            raise TypeError(f"RotaryEmbedding() has no arguments {', '.join(sorted(unknown))}")
        dim = int(kv_channels * rotary_percent)
        frequencies = rotary_base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if rope_scaling:
            frequencies = Llama3Scaling(rope_scaling_factor).scaled(frequencies, rotary_base, dim, 0)
        self.rotary_interleaved, self.factor = rotary_interleaved, seq_len_interpolation_factor or 1.0
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.cp_group = options.get("cp_group")

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: AnyGroup = None) -> Tensor:
        """Return [max_seq_len, 1, 1, d], or this context-parallel rank's part of it unless ``packed_seq``."""
        positions = (torch.arange(max_seq_len, device=self.inv_freq.device) + offset).float() / self.factor
        angles = torch.outer(positions, self.inv_freq)
        table = angles.repeat_interleave(2, dim=-1) if self.rotary_interleaved else torch.cat((angles, angles), dim=-1)
        table = table[:, None, None]
        return table if packed_seq else get_pos_emb_on_this_cp_rank(table, 0, cp_group or self.cp_group)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: TransformerConfig,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: AnyGroup = None,
) -> Tensor:
    """Return ``t`` [s, b, heads, channels] rotated, or ``t`` [tokens, heads, channels] of documents with bounds
    ``cu_seqlens``, whose positions each begin at 0 (ValueError under context parallelism). Channels beyond the angles
    stay. ``mscale`` multiplies the rotated ones."""
    pairs = bool(config.rotary_interleaved), bool(getattr(config, "multi_latent_attention", False))
    if cu_seqlens is None:
        return _apply_rotary_pos_emb_bshd(t, freqs, *pairs, mscale=mscale)
    if resolve_group(cp_group, "cp").size > 1:
        raise ValueError("apply_rotary_pos_emb: documents split over context-parallel ranks are not available here")
    places = torch.arange(t.shape[0], device=t.device)
    document = torch.bucketize(places, cu_seqlens[1:].to(places.dtype), right=True)
    starts = cu_seqlens[document.clamp(max=len(cu_seqlens) - 1)]
    return _apply_rotary_pos_emb_bshd(t[:, None], freqs[places - starts], *pairs, mscale=mscale)[:, 0]
