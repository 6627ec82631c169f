"""Description of T5 models. Torch-free.

Bytes per token (see ``core/description/model.py``) are per token of the encoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.core.attention.description import describe_cross_attention
from megatron.core.config.problems import Settings
from megatron.core.description.model import Config, LayerPlace, ModelDescription, Param, Piece
from megatron.core.description.parts import norm, residual_branch
from megatron.core.models.common import description as common
from megatron.core.models.t5.config import EncoderDecoderConfig
from megatron.core.pipeline_parallel.stages import BranchNames

OWN_SETTINGS = (
    "decoder_num_layers",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "scale_decoder_outputs",
)
ENCODER_LAYER = ("attention", "feed-forward")
DECODER_LAYER = ("attention", "cross-attention", "feed-forward")


@dataclass(frozen=True)
class EncoderDecoder:
    """Sizes of both stacks that the configuration does not have; ``config.num_layers`` is the encoder's depth."""

    encoder_length: int
    decoder_length: int
    decoder_layers: int
    num_buckets: int = 32
    """Number of relative-position buckets."""

    @property
    def share(self) -> float:
        """Number of decoder tokens per encoder token."""
        return self.decoder_length / self.encoder_length


def describe_settings(cfg: Settings, vocab_size: int) -> ModelDescription:
    """Return the description of the T5 that ``cfg`` defines. The decoder's sizes default to the encoder's."""
    decoder, length = cfg.group(EncoderDecoderConfig), cfg.data.seq_length
    sizes = EncoderDecoder(
        length,
        decoder.decoder_seq_length or length,
        decoder.decoder_num_layers or cfg.model.num_layers,
        decoder.relative_attention_num_buckets,
    )
    return describe_t5(
        cfg.model,
        common.Vocabulary.of_settings(cfg, vocab_size),
        sizes,
        max_sequence_length=cfg.embeddings.max_position_embeddings,
        position_embedding_type=cfg.embeddings.position_embedding_type,
    )


def branches(cfg: Settings) -> BranchNames:
    """Return the branch names of each layer, the encoder's first."""
    depth = cfg.group(EncoderDecoderConfig).decoder_num_layers or cfg.model.num_layers
    return [*[ENCODER_LAYER] * cfg.model.num_layers, *[DECODER_LAYER] * depth]


def describe_t5(
    config: Config,
    vocabulary: common.Vocabulary,
    sizes: EncoderDecoder,
    *,
    max_sequence_length: int,
    position_embedding_type: str = "learned_absolute",
    specs: tuple[object, object] = (None, None),
) -> ModelDescription:
    """Return the description of the model that :class:`T5Model` builds from the same arguments, for samples without
    padding. A vocabulary size of 0 means unknown. ``specs`` holds the encoder's and the decoder's spec, each as in
    :func:`describe_gpt`."""
    word, output = common.word_tables(config, vocabulary)
    positions = max_sequence_length if position_embedding_type == "learned_absolute" else 0
    embedding = common.describe_embedding(config, word, positions, (*common.SETTINGS, *OWN_SETTINGS))
    tables: list[Param] = []
    if position_embedding_type == "relative":
        shape = sizes.num_buckets, config.num_attention_heads
        names = (f"{stack}_relative_pos_emb.relative_attention_bias.weight" for stack in ("encoder", "decoder"))
        tables = [Param(name, shape, {"tp": 1}) for name in names]
    look_ups = (*embedding.ops, *embedding.scaled_to_tokens(sizes.share).ops)
    embedding = replace(embedding, params=(*embedding.params, *tables), ops=look_ups)
    layers = tuple(_layers(config, sizes, position_embedding_type in ("rope", "yarn"), specs))
    output = replace(output, name="lm_head.output_layer.weight")
    return ModelDescription(embedding, layers, _head(config, output, sizes, vocabulary.shared))


def _layers(
    config: Config, sizes: EncoderDecoder, rotary: bool, specs: tuple[object, object]
) -> Iterator[tuple[Piece, ...]]:
    """Yield the branches of each encoder layer (the last with the final norm), then of each decoder layer. Layer
    numbers continue; parameter names count from 0 in each stack. Costs are per encoder token."""
    for index, describe in enumerate(common.layer_descriptions(specs[0], config.num_layers, common.encoder_layer)):
        layer = describe(config, LayerPlace(index + 1, sizes.encoder_length, rotary, causal=False))
        branches = tuple(branch.under(f"encoder.layers.{index}.") for branch in layer)
        if index == config.num_layers - 1:
            final = norm("encoder.final_layernorm", config.hidden_size, config)
            branches = (*branches[:-1], replace(branches[-1], params=(*branches[-1].params, *final)))
        yield branches
    for index, describe in enumerate(common.layer_descriptions(specs[1], sizes.decoder_layers, _decoder_layer)):
        number, source = config.num_layers + index + 1, sizes.encoder_length
        layer = describe(config, LayerPlace(number, sizes.decoder_length, rotary, source_length=source))
        yield tuple(branch.under(f"decoder.layers.{index}.").scaled_to_tokens(sizes.share) for branch in layer)


def _decoder_layer(config: Config, place: LayerPlace) -> tuple[Piece, ...]:
    attention, mlp = common.encoder_layer(config, place)
    cross = residual_branch(
        describe_cross_attention(config, place), config, name="cross_attention", norm_name="pre_cross_attn_layernorm"
    )
    return attention, cross, mlp


def _head(config: Config, output: Param, sizes: EncoderDecoder, shared: bool) -> Piece:
    """Describe the final norm of the decoder, the output layer and the loss, with costs per encoder token. A shared
    output weight has a bias unless ``scale_decoder_outputs`` is set."""
    head = common.describe_head(config, output, sizes.decoder_length)
    more = [common.output_bias(output)] if shared and not config.scale_decoder_outputs else []
    return replace(head, params=(*head.params, *more)).scaled_to_tokens(sizes.share)
