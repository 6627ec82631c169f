"""Sizes that an encoder-decoder has beside those of every model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.core.config.cli import flag
from megatron.core.config.ranges import Dim, Layers, Range


@dataclass(kw_only=True)
class EncoderDecoderConfig:
    """Encoder and decoder (pretrain_t5.py)"""

    decoder_num_layers: Layers = flag()
    """Decoder layers; default: as many as the encoder has."""

    decoder_seq_length: Dim = flag()
    """Tokens of the decoder per sample. Required by pretrain_t5.py."""

    relative_attention_num_buckets: Annotated[int, Range(4, 65536)] = 32
    """Distances that --position-embedding-type relative tells apart; even."""

    relative_attention_max_distance: Dim = 128
    """Distance from which on all are alike; more than half of the buckets."""
