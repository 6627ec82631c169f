"""Describes the GPT that ``gpt/`` builds. Torch-free."""

from __future__ import annotations

import math

from megatron.core.attention.description import describe_attention
from megatron.core.description.model import (
    Config,
    ModelDescription,
    Op,
    Param,
    Piece,
    Saved,
    activation_bytes,
    gemm,
    norm,
    stream_elements,
)
from megatron.core.transformer.mlp_description import describe_mlp


def describe_gpt(
    config: Config,
    *,
    vocab_size: int,
    seq_length: int,
    max_sequence_length: int,
    position_embedding_type: str = "learned_absolute",
    share_embeddings_and_output_weights: bool = False,
    make_vocab_size_divisible_by: int = 128,
) -> ModelDescription:
    """The model that :class:`GPTModel` builds from the same arguments, on ``seq_length`` tokens a sequence.

    ``vocab_size`` is the true size; 0 where it is not known.
    """
    multiple = math.lcm(make_vocab_size_divisible_by, config.tensor_model_parallel_size)
    table = (vocab_size, config.hidden_size)
    stored = (-(-vocab_size // multiple) * multiple, config.hidden_size)
    word = Param("embedding.word_embeddings.weight", table, {"tp": 0}, stored)
    rotary = position_embedding_type in ("rope", "yarn")
    layers = []
    for index in range(config.num_layers):
        attention = describe_attention(config, index + 1, seq_length, rotary=rotary)
        mlp = describe_mlp(config, index + 1, seq_length)
        layers.append(tuple(branch.under(f"decoder.layers.{index}.") for branch in (attention, mlp)))
    tied_to = word.name if share_embeddings_and_output_weights else None
    output = Param("output_layer.weight", table, {"tp": 0}, stored, tied_to=tied_to)
    positions = max_sequence_length if position_embedding_type == "learned_absolute" else 0
    return ModelDescription(_embedding(config, word, positions), tuple(layers), _head(config, output, seq_length))


def describe_run(cfg: Config, vocab_size: int) -> ModelDescription:
    """The GPT of resolved settings (a PretrainConfig)."""
    return describe_gpt(
        cfg, vocab_size=vocab_size, seq_length=cfg.seq_length, max_sequence_length=cfg.max_position_embeddings,
        position_embedding_type=cfg.position_embedding_type,
        share_embeddings_and_output_weights=not cfg.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=cfg.make_vocab_size_divisible_by,
    )  # fmt: skip


def _embedding(config: Config, word: Param, positions: int) -> Piece:
    """Words, and ``positions`` learned positions where there are any."""
    params = [word]
    if positions:
        params.append(Param("embedding.position_embeddings.weight", (positions, config.hidden_size)))
    elements = stream_elements(config)
    # a row is read, written and read again as a gradient, and added to a gradient of four bytes
    traffic = (3.0 * activation_bytes(config) + 2 * 4) * elements
    saved = (Saved("dropout mask", elements),) if config.hidden_dropout else ()
    return Piece("embedding", tuple(params), (Op("embedding", "embedding", traffic=traffic, saved=saved),))


def _head(config: Config, output: Param, seq_length: int) -> Piece:
    """Final norm, output layer, loss. Logits that exist a chunk at a time are computed again, not kept."""
    elements, item, tp = stream_elements(config), activation_bytes(config), config.tensor_model_parallel_size
    assert output.stored is not None
    stored, hidden = output.stored[0] // tp, config.hidden_size
    final = Op("norm", "final_layernorm", traffic=8.0 * item * elements, saved=(Saved("stream", 2 * elements * item),))
    product = gemm(output, config, seq_length)
    logits = (Saved("logits", stored * item),) if config.cross_entropy_chunk_tokens is None else ()
    loss = Op("cross entropy", "cross entropy", traffic=3.0 * item * stored, saved=logits)
    norms = [*norm("decoder.final_layernorm", hidden, config)]
    return Piece("output layer", (*norms, output), (final, product, loss))
