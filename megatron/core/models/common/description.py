"""Description of the embedding, output layer and vocabulary of language models. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.attention.description import describe_attention
from megatron.core.config.layer_kinds import BRANCHES
from megatron.core.config.mup import SETTINGS as MUP_SETTINGS
from megatron.core.config.problems import Settings
from megatron.core.description import parts
from megatron.core.description.model import Config, LayerPlace, Op, Param, Piece, Saved
from megatron.core.transformer.mlp_description import describe_mlp

SETTINGS = (
    "num_layers",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
    "position_embedding_type",
    "untie_embeddings_and_output_weights",
    "use_parallel_residual",
    "share_parallel_norm",
    "learned_position_offset",
    "output_layer_bias",
    "apply_embedding_scaling",
    "final_logit_softcapping",
    "embedding_multiplier",
    "logits_scaling",
    *MUP_SETTINGS,
    *parts.RESIDUAL_SETTINGS,
)
"""Settings that the weights outside the layers depend on."""


@dataclass(frozen=True)
class Vocabulary:
    """Sizes of the word embedding and the output layer. ``size`` is the unpadded number of entries. The stored number
    is padded to a multiple of ``divisible_by``; the padding takes part in no computation."""

    size: int
    shared: bool
    """Whether the output layer uses the embedding's weight."""
    divisible_by: int = 128

    @classmethod
    def of_settings(cls, cfg: Settings, size: int) -> Vocabulary:
        """Return the vocabulary of a run; ``size`` 0 means unknown."""
        embeddings = cfg.embeddings
        shared = not embeddings.untie_embeddings_and_output_weights
        return cls(size, shared, embeddings.make_vocab_size_divisible_by)


LayerDescription = Callable[[Config, LayerPlace], tuple[Piece, ...]]


def layer_descriptions(spec: Any, num_layers: int, built_in: LayerDescription) -> Sequence[LayerDescription]:
    """Return one describing function per layer of ``spec``, which is one spec for all layers or one per layer. None
    returns ``built_in`` for every layer and does not import torch."""
    if spec is None:
        return [built_in] * num_layers
    from megatron.core.transformer.layer_description import describe_layer  # imported here: specs need torch
    from megatron.core.transformer.transformer_block import layer_specs

    return [partial(describe_layer, layer_spec) for layer_spec in layer_specs(spec, num_layers)]


def residual_branches(config: Config, mixers: Mapping[str, Piece], layer_number: int = 1) -> tuple[Piece, ...]:
    """Return the branches of a layer (from 1) from the description of each mixer by its kind
    (``config/layer_kinds.py``), or one combined piece with parallel residual branches."""
    branches = tuple(
        parts.residual_branch(
            mixer,
            config,
            name=BRANCHES[kind].name,
            norm_name=BRANCHES[kind].norm,
            reads_norm=config.share_parallel_norm and index > 0,
            layer_number=layer_number,
        )
        for index, (kind, mixer) in enumerate(mixers.items())
    )
    return (parts.one_piece(branches),) if config.use_parallel_residual else branches


def encoder_layer(config: Config, place: LayerPlace) -> tuple[Piece, ...]:
    """Describe a layer of attention (masked as ``place`` says) and one dense feed-forward network."""
    return residual_branches(
        config, {"attention": describe_attention(config, place), "mlp": describe_mlp(config, place)}
    )


def word_tables(config: Config, vocabulary: Vocabulary) -> tuple[Param, Param]:
    """Return the word embedding and the output weight, both [v, h] split over TP along v. ``stored`` is padded to a
    multiple of ``divisible_by`` and TP. A shared output weight is ``tied_to`` the embedding."""
    multiple = math.lcm(vocabulary.divisible_by, config.tensor_model_parallel_size)
    table = (vocabulary.size, config.hidden_size)
    stored = (-(-vocabulary.size // multiple) * multiple, config.hidden_size)
    word = Param("embedding.word_embeddings.weight", table, {"tp": 0}, stored)
    tied_to = word.name if vocabulary.shared else None
    return word, Param("output_layer.weight", table, {"tp": 0}, stored, tied_to=tied_to)


def describe_embedding(config: Config, word: Param, positions: int, settings: tuple[str, ...]) -> Piece:
    """Describe the embedding: word table, ``positions`` learned positions (0: none), look-up cost and dropout mask.
    ``settings`` names the settings that weights outside the layers depend on."""
    params = [word]
    if positions:
        rows = positions + config.learned_position_offset
        params.append(Param("embedding.position_embeddings.weight", (rows, config.hidden_size)))
    elements = parts.stream_elements(config)
    # the look-up reads and writes a row, backward reads its gradient and adds it to an fp32 gradient
    traffic = (3.0 * parts.activation_bytes(config) + 2 * 4) * elements
    saved = (Saved("dropout mask", elements),) if config.hidden_dropout else ()
    look_up = Op("embedding", "embedding", traffic=traffic, saved=saved)
    return Piece("embedding", tuple(params), (look_up,), settings=settings)


def describe_head(config: Config, output: Param, seq_length: int, final_norm: str = "decoder.final_layernorm") -> Piece:
    """Describe the final norm, output layer and loss. ``cross_entropy_chunk_tokens`` saves no logits."""
    elements, item = parts.stream_elements(config), parts.activation_bytes(config)
    assert output.stored is not None
    stored, hidden = output.stored[0] // config.tensor_model_parallel_size, config.hidden_size
    final = Op("norm", "final_layernorm", traffic=8.0 * item * elements, saved=(Saved("stream", 2 * elements * item),))
    output_gemm = parts.gemm(output, config, seq_length)
    copies = 2 if config.final_logit_softcapping else 1
    logits = (Saved("logits", copies * stored * item),) if config.cross_entropy_chunk_tokens is None else ()
    loss = Op("cross entropy", "cross entropy", traffic=3.0 * item * stored, saved=logits)
    params = [*parts.norm(final_norm, hidden, config), output]
    if config.output_layer_bias:
        params.append(output_bias(output))
    return Piece("output layer", tuple(params), (final, output_gemm, loss))


def output_bias(output: Param) -> Param:
    """Return the bias [v] of the output layer of weight ``output``, split over TP along v."""
    name, stored = f"{output.name.removesuffix('.weight')}.bias", None if output.stored is None else output.stored[:1]
    return Param(name, output.shape[:1], {"tp": 0}, stored, ndim=1)
