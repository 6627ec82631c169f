"""Checks of T5's attention masks in Megatron-LM's form: bool [b, 1, q, k], [b, 1, 1, k] or [b, q, k], True where
hidden. The model uses only the encoder's text lengths, so other masks must be equivalent to those lengths and to
causality.

Legend: b batch, q queries, k keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.packed_seq_params import is_on_host


def token_mask(mask: Tensor) -> Tensor:
    """Return bool [b, k], True for keys that are tokens. 2-d masks are returned as bool (1 for tokens); in others, True
    hides: a key is a token if any query sees it."""
    return mask.bool() if mask.dim() == 2 else _visible(mask).any(1)


def check_masks(
    decoder_attn_mask: Tensor | None, encoder_decoder_attn_mask: Any, encoder_tokens: Tensor | None
) -> None:
    """Raise ValueError unless the decoder's mask is causal (with one query row: any) with padding at the end, and the
    cross mask, or the last of a pair, shows exactly ``encoder_tokens``, bool [b, k] (None: all). Rows of padding may
    hide anything. Masks that are None pass. On GPUs it is a device assertion, which does not synchronize."""
    if decoder_attn_mask is not None:
        visible = _visible(decoder_attn_mask)
        tokens = visible.any(1)
        expected = tokens[:, None].expand_as(visible)
        if visible.shape[1] > 1:
            expected = expected & torch.ones_like(visible).tril()
        fits = visible == expected
        if visible.shape[1] > 1:
            fits |= ~tokens[:, :, None]
        is_behind = (tokens.int().diff(dim=1) <= 0).all()
        fits = is_behind & fits.all()
        _require(fits, "decoder_attn_mask: must be causal, with padding behind all tokens")
    if encoder_decoder_attn_mask is not None:
        is_pair = isinstance(encoder_decoder_attn_mask, tuple | list)
        visible = _visible(encoder_decoder_attn_mask[-1] if is_pair else encoder_decoder_attn_mask)
        expected = torch.ones_like(visible) if encoder_tokens is None else encoder_tokens[:, None].expand_as(visible)
        fits = (visible == expected) | ~visible.any(2, keepdim=True)
        _require(fits.all(), "encoder_decoder_attn_mask: must show the encoder's tokens, and hide its padding only")


def _visible(mask: Tensor) -> Tensor:
    """Return bool [b, q or 1, k], True where a query may attend to a key."""
    return ~(mask[:, 0] if mask.dim() == 4 else mask).bool()


def _require(fits: Tensor, message: str) -> None:
    if not is_on_host(fits):
        torch._assert_async(fits)
    elif not fits:
        raise ValueError(message)
