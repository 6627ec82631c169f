"""Model settings outside of the transformer: positions, vocabulary padding, output layer, BERT and T5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.ranges import Dim, Layers, PositiveFloat, Range, RotaryBase


@dataclass(kw_only=True)
class ModelConfig:
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

    use_rope_scaling: bool = False
    """Scale low rotary frequencies as Llama 3.1 does."""

    rope_scaling_factor: PositiveFloat = 8.0
    """Factor of --use-rope-scaling: 8 for Llama 3.1, 32 for Llama 3.2."""

    make_vocab_size_divisible_by: Dim = 128
    """Pad the vocabulary to a multiple of this number; padding never affects the loss."""

    untie_embeddings_and_output_weights: bool = False
    """Use separate weights for the output layer instead of the embedding's."""

    group_query_attention: bool = False
    """Grouped-query attention: --num-query-groups groups of query heads share keys and values."""

    encoder_num_layers: Layers = flag()
    """Encoder layers of an encoder-decoder model; default: --num-layers."""

    spec: list[str] | None = flag("--spec", nargs="*", metavar="MODULE NAME")
    """Python module and name of custom layers: the spec of one layer or all layers, or a function that returns it
    and may take the library's ``config``. ``local``: the built-in layers."""

    bert_binary_head: bool = flag("--bert-no-binary-head", default=True)
    """Train on pairs of texts, with the binary head for their order and token types (pretrain_bert.py)."""


@dataclass(kw_only=True)
class EncoderDecoderConfig:
    """Encoder and decoder (pretrain_t5.py)"""

    decoder_num_layers: Layers = flag()
    """Decoder layers; default: the number of encoder layers."""

    decoder_seq_length: Dim = flag()
    """Decoder tokens per sample. Required by pretrain_t5.py."""

    relative_attention_num_buckets: Annotated[int, Range(4, 65536)] = 32
    """Number of distance buckets of --position-embedding-type relative; even."""

    relative_attention_max_distance: Dim = 128
    """Distance from which all larger ones use the same bucket; more than half of the buckets."""
