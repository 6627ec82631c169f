"""Describes what stands around the layers of language models. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.attention.description import describe_attention
from megatron.core.description import parts
from megatron.core.description.model import Config, LayerPlace, Op, Param, Piece, Saved
from megatron.core.transformer.mlp_description import describe_mlp

SETTINGS = (
    "num_layers", "mtp_num_layers", "mtp_use_repeated_layer", "position_embedding_type",
    "untie_embeddings_and_output_weights", "use_parallel_residual", "apply_embedding_scaling",
    "final_logit_softcapping", *parts.RESIDUAL_SETTINGS,
)  # fmt: skip
"""Settings that the weights around its layers depend on."""


@dataclass(frozen=True)
class Vocabulary:
    """Word embeddings and output layer. ``size`` is the true number of entries; a multiple of ``divisible_by`` is
    stored, and the padding takes part in nothing."""

    size: int
    shared: bool
    """Whether the output layer's weight is the embedding's."""
    divisible_by: int = 128


LayerDescription = Callable[[Config, LayerPlace], tuple[Piece, ...]]


def layer_descriptions(spec: Any, num_layers: int, built_in: LayerDescription) -> Sequence[LayerDescription]:
    """What describes each layer of ``spec``: that of a layer, or one per layer; None: all are ``built_in``, and
    described without torch."""
    if spec is None:
        return [built_in] * num_layers
    from megatron.core.transformer.layer_description import describe_layer  # specs are of torch's modules
    from megatron.core.transformer.transformer_block import layer_specs

    return [partial(describe_layer, each) for each in layer_specs(spec, num_layers)]


def attention_and_feed_forward(config: Config, attention: Piece, feed_forward: Piece) -> tuple[Piece, ...]:
    """The branches of a layer, or their sum where they are parallel."""
    branches = (
        parts.residual_branch(attention, config, name="self_attention", norm_name="input_layernorm"),
        parts.residual_branch(feed_forward, config, name="mlp", norm_name="pre_mlp_layernorm"),
    )
    return (parts.one_piece(branches),) if config.use_parallel_residual else branches


def encoder_layer(config: Config, place: LayerPlace) -> tuple[Piece, ...]:
    """A layer of attention and one feed-forward network."""
    return attention_and_feed_forward(config, describe_attention(config, place), describe_mlp(config, place))


def word_tables(config: Config, vocabulary: Vocabulary) -> tuple[Param, Param]:
    """Word embeddings and the weight of the output layer, a copy of them where it is shared."""
    multiple = math.lcm(vocabulary.divisible_by, config.tensor_model_parallel_size)
    table = (vocabulary.size, config.hidden_size)
    stored = (-(-vocabulary.size // multiple) * multiple, config.hidden_size)
    word = Param("embedding.word_embeddings.weight", table, {"tp": 0}, stored)
    tied_to = word.name if vocabulary.shared else None
    return word, Param("output_layer.weight", table, {"tp": 0}, stored, tied_to=tied_to)


def describe_embedding(config: Config, word: Param, positions: int, settings: tuple[str, ...]) -> Piece:
    """Words, and ``positions`` learned positions where there are any; the ``settings`` that weights around the layers
    depend on."""
    params = [word]
    if positions:
        params.append(Param("embedding.position_embeddings.weight", (positions, config.hidden_size)))
    elements = parts.stream_elements(config)
    # a row is read, written and read again as a gradient, and added to a gradient of four bytes
    traffic = (3.0 * parts.activation_bytes(config) + 2 * 4) * elements
    saved = (Saved("dropout mask", elements),) if config.hidden_dropout else ()
    look_up = Op("embedding", "embedding", traffic=traffic, saved=saved)
    return Piece("embedding", tuple(params), (look_up,), settings=settings)


def describe_head(config: Config, output: Param, seq_length: int, final_norm: str = "decoder.final_layernorm") -> Piece:
    """Final norm, output layer, loss. Logits that exist a chunk at a time are computed again, not kept."""
    elements, item = parts.stream_elements(config), parts.activation_bytes(config)
    assert output.stored is not None
    stored, hidden = output.stored[0] // config.tensor_model_parallel_size, config.hidden_size
    final = Op("norm", "final_layernorm", traffic=8.0 * item * elements, saved=(Saved("stream", 2 * elements * item),))
    output_gemm = parts.gemm(output, config, seq_length)
    copies = 2 if config.final_logit_softcapping else 1
    logits = (Saved("logits", copies * stored * item),) if config.cross_entropy_chunk_tokens is None else ()
    loss = Op("cross entropy", "cross entropy", traffic=3.0 * item * stored, saved=logits)
    norms = [*parts.norm(final_norm, hidden, config)]
    return Piece("output layer", (*norms, output), (final, output_gemm, loss))
