"""Model settings outside of the transformer: positions, vocabulary padding and output layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Dim, Layers, Range, RotaryBase


@dataclass(kw_only=True)
class ModelConfig(FlagGroup):
    """Positions, embeddings and heads"""

    max_position_embeddings: Dim = flag()
    """Maximum sequence length, and size of the learned position table. Required; at least --seq-length."""

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "relative", "none"] = "learned_absolute"
    """Positions: a learned table, rotary, rotary extended by YaRN, an attention bias by distance (pretrain_t5.py), or
    none."""

    add_position_embedding: bool = flag("--no-position-embedding", default=True)
    """Learned position table; disable it only together with another --position-embedding-type."""

    rotary_base: RotaryBase = 10000
    """Base of the rotary frequencies."""

    rotary_percent: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Fraction of each head's channels that is rotated."""

    rotary_seq_len_interpolation_factor: Dim | None = None
    """Divide positions by this number (linear interpolation to longer contexts)."""

    make_vocab_size_divisible_by: Dim = 128
    """Pad the vocabulary to a multiple of this number; padding never affects the loss."""

    untie_embeddings_and_output_weights: bool = False
    """Use separate weights for the output layer instead of the embedding's."""

    group_query_attention: bool = False
    """Grouped-query attention: --num-query-groups groups of query heads share keys and values."""

    encoder_num_layers: Layers = flag()
    """Encoder layers of an encoder-decoder model; default: --num-layers."""
