"""Description of GPT models: parameters, FLOPs and memory. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.core.attention.description import describe_attention
from megatron.core.attention.latent_description import describe_latent_attention
from megatron.core.attention.window import has_rotation, layer_window
from megatron.core.config.hybrid import depth_kinds
from megatron.core.config.layer_kinds import layer_kinds, norm_places
from megatron.core.config.problems import Settings
from megatron.core.description.model import Config, LayerPlace, ModelDescription, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, norm, stream_elements
from megatron.core.models.common import description as common
from megatron.core.models.gpt.custom_layers import spec_layers
from megatron.core.transformer.mlp_description import describe_mlp
from megatron.core.transformer.moe.moe_description import describe_moe
from megatron.core.transformer.ssm.description import (
    describe_gated_delta_net,
    describe_kimi_delta_attention,
    describe_mamba,
)


def describe_settings(cfg: Settings, vocab_size: int) -> ModelDescription:
    """Return the description of the GPT that ``cfg`` defines, with the layers of --spec, which imports torch."""
    return describe_gpt(
        cfg.model,
        vocab_size=vocab_size,
        seq_length=cfg.data.seq_length,
        max_sequence_length=cfg.embeddings.max_position_embeddings,
        position_embedding_type=cfg.embeddings.position_embedding_type,
        share_embeddings_and_output_weights=not cfg.embeddings.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=cfg.embeddings.make_vocab_size_divisible_by,
        spec=spec_layers(cfg),
    )


def describe_gpt(
    config: Config,
    *,
    vocab_size: int,
    seq_length: int,
    max_sequence_length: int,
    position_embedding_type: str = "learned_absolute",
    share_embeddings_and_output_weights: bool = False,
    make_vocab_size_divisible_by: int = 128,
    spec: object = None,
) -> ModelDescription:
    """Return the description of the model that :class:`GPTModel` builds from the same arguments, for sequences of
    ``seq_length`` tokens. ``vocab_size`` is the unpadded size, or 0 if unknown. ``spec`` is one spec for all layers or
    one per layer (UserError for another number); None: attention and a feed-forward network, without importing
    torch."""
    vocabulary = common.Vocabulary(vocab_size, share_embeddings_and_output_weights, make_vocab_size_divisible_by)
    word, output = common.word_tables(config, vocabulary)
    rotary, layers, alike = position_embedding_type in ("rope", "yarn"), [], {}
    for index, describe in enumerate(common.layer_descriptions(spec, config.num_layers, _decoder_layer)):
        key = _layer_kind(config, index + 1) if describe is _decoder_layer else index
        if key not in alike:  # a plan describes hundreds of models, whose layers are of a few kinds
            alike[key] = describe(config, LayerPlace(index + 1, seq_length, rotary))
        layers.append(tuple(branch.under(f"decoder.layers.{index}.") for branch in alike[key]))
    positions = max_sequence_length if position_embedding_type == "learned_absolute" else 0
    embedding, predictions = common.describe_embedding(config, word, positions, common.SETTINGS), []
    describe = common.layer_descriptions(spec, config.num_layers, _decoder_layer)[-1]
    for depth in range(config.mtp_num_layers or 0):
        same = bool(depth) and config.mtp_use_repeated_layer
        place = LayerPlace(config.num_layers + (0 if same else depth) + 1, seq_length, rotary)
        branches = _depth_layers(config, place) or describe(config, place)
        pieces = _prediction(config, branches, output, seq_length, embedding)
        predictions += [replace(piece, params=()) if same else piece.under(f"mtp.layers.{depth}.") for piece in pieces]
    head = common.describe_head(config, output, seq_length)
    return ModelDescription(embedding, tuple(layers), head, tuple(predictions))


DESCRIBE = {
    "attention": describe_attention,
    "latent_attention": describe_latent_attention,
    "gated_delta_net": describe_gated_delta_net,
    "kimi_delta_attention": describe_kimi_delta_attention,
    "mamba": describe_mamba,
    "mlp": describe_mlp,
    "experts": describe_moe,
}
"""Description of each kind of branch (``config/layer_kinds.py``)."""


def _layer_kind(config: Config, number: int) -> tuple[object, ...]:
    """Return all that distinguishes the built-in layer ``number`` from others: branches, norms, window, rotation."""
    windowed = layer_window(config.window_size, config.window_attn_skip_freq, number) is not None
    return layer_kinds(config, number), norm_places(config, number), windowed, has_rotation(config.no_rope_freq, number)


def _decoder_layer(config: Config, place: LayerPlace) -> tuple[Piece, ...]:
    number = min(place.layer_number, config.num_layers)  # multi-token prediction layers are like the last layer
    mixers = {kind: DESCRIBE[kind](config, place) for kind in layer_kinds(config, number)}
    return common.residual_branches(config, mixers, number)


def _depth_layers(config: Config, place: LayerPlace) -> tuple[Piece, ...]:
    """Return the branches of the layers that a hybrid pattern gives a prediction depth; empty without."""
    layers = [common.residual_branches(config, {kind: DESCRIBE[kind](config, place)}) for kind in depth_kinds(config)]
    return tuple(branch.under(f"layers.{index}.") for index, layer in enumerate(layers) for branch in layer)


def _prediction(
    config: Config, branches: tuple[Piece, ...], output: Param, seq_length: int, embedding: Piece
) -> Iterator[Piece]:
    """Yield the pieces of one multi-token prediction depth: norms and projection, the layer's branches, and the output
    layer, which is computed again but shares its weight."""
    hidden = config.hidden_size
    norms = [param for name in ("enorm", "hnorm") for param in norm(name, hidden, config)]
    project, size = Param("eh_proj.weight", (hidden, 2 * hidden)), stream_elements(config) * activation_bytes(config)
    streams = (Saved("embeddings and hidden states", 2 * size), Saved("both, normed", 2 * size))
    ops = (*embedding.ops, gemm(project, config, seq_length, gradients=size, saved=streams))
    yield Piece("prediction", (*norms, project), ops)
    yield from (branch.under("mtp_model_layer.") for branch in branches)
    head = common.describe_head(config, output, seq_length)
    yield replace(head, params=tuple(norm("final_layernorm", hidden, config)))
