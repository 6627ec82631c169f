"""Inputs of core attention besides queries, keys and values, for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import ONE_RANK, TokenLayout
from megatron.core.random.dropout import DropoutCoordinates


@dataclass(frozen=True)
class AttentionContext:
    """Inputs that all attention layers share. Every default means "not used"."""

    layout: TokenLayout = ONE_RANK
    """Tokens that this rank holds, with their documents."""
    attention_mask: Tensor | None = None
    """Bool, True where hidden, broadcast to [b, heads, queries, keys]; combined with the mask type of the attention.
    Cross-attention ignores it."""
    dropout: DropoutCoordinates | None = None
    """Sample indices and positions of the tokens, from which dropout masks are computed; None: no dropout."""
    position_bias: Tensor | None = None
    """[heads, distances], added to the self-attention scores (``attention/position_bias.py``)."""
    encoder_documents: PackedSeqParams | None = None
    """Documents that mark the keys which cross-attention sees (:meth:`PackedSeqParams.of_keys`); None: all keys."""
