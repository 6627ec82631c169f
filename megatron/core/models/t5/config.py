"""Flags of encoder-decoder models. Only fields, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import Dim, Layers, Range


@dataclass(kw_only=True)
class EncoderDecoderConfig(OptionalGroup):
    """Encoder and decoder (pretrain_t5.py)"""

    CHOICES: ClassVar[Mapping[str, tuple[object, str]]] = {
        "position_embedding_type": ("relative", "--position-embedding-type rope")
    }

    decoder_num_layers: Layers = flag()
    """Decoder layers; default: the number of encoder layers."""

    decoder_seq_length: Dim = flag()
    """Decoder tokens per sample. Required by pretrain_t5.py."""

    relative_attention_num_buckets: Annotated[int, Range(4, 65536)] = 32
    """Number of distance buckets of --position-embedding-type relative; even."""

    relative_attention_max_distance: Dim = 128
    """Distance from which all larger ones use the same bucket; more than half of the buckets."""
