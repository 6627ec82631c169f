"""T5: an encoder of a text in which spans are missing, a decoder that writes them.

Both stacks are one row of layers, the encoder's first, which pipeline stages share out. Between stages travels what
each of the stacks has so far (:class:`Streams`), so that no stage but the first looks tokens up.

Legend: e, s sequence of the encoder and of the decoder (this rank's positions), b batch, h hidden, v vocabulary entries
of this rank (stored, padding included), n buckets, a heads (local).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.attention.packed_seq_params import PackedSeqParams, lengths_of_mask
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.common.language_module import LanguageModule, PositionEmbeddingType, Positions, Vocabulary
from megatron.core.models.common.relative_positions import RelativePositionEmbedding, position_bias
from megatron.core.models.t5_description import EncoderDecoder, describe_t5
from megatron.core.tensor_parallel.layers import VocabParallelOutput
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

LayerSpec = ModuleSpec | TransformerBlockSubmodules


class Streams(NamedTuple):
    """What travels between stages."""

    encoder: Tensor
    """[e, b, h], behind the encoder's last layer normed."""
    decoder: Tensor
    """[s, b, h]."""
    encoder_table: Tensor | None = None
    """[n, a] of relative positions, which only the first stage holds; None: positions are told otherwise."""
    decoder_table: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Streams:
        """The same in the dtype of messages."""
        return Streams._make(None if each is None else each.to(dtype) for each in self)


class T5LMHead(nn.Module):
    """The output layer, under the name that checkpoints know."""

    def __init__(self, output_layer: VocabParallelOutput) -> None:
        super().__init__()
        self.output_layer = output_layer


class T5Model(LanguageModule):
    """Token ids to logits of the decoder's tokens, or to per-token losses where labels are given.

    Arguments are otherwise those of :class:`GPTModel`. ``config`` is the decoder's, ``encoder_config`` the encoder's
    (``num_layers``; all else is the same). Stages are shared out as for sequences of
    ``max_sequence_length`` unless ``branches`` says which of all branches this one holds.
    """

    def __init__(
        self,
        config: TransformerConfig,
        encoder_config: TransformerConfig,
        transformer_encoder_layer_spec: LayerSpec,
        transformer_decoder_layer_spec: LayerSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbeddingType | Literal["relative"] = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        vp_stage: int | None = None,
        *,
        rotary_base: float = 10000,
        make_vocab_size_divisible_by: int = 128,
        seed: int | None = None,
        groups: ProcessGroups | None = None,
        branches: range | None = None,
    ) -> None:
        relative = position_embedding_type == "relative"
        super().__init__(
            config,
            Vocabulary(vocab_size, share_embeddings_and_output_weights, make_vocab_size_divisible_by),
            Positions(
                max_sequence_length, "none" if relative else position_embedding_type, rotary_percent, rotary_base,
                seq_len_interpolation_factor,
            ),
            pre_process=pre_process, post_process=post_process, seed=seed, groups=groups, vp_stage=vp_stage,
        )  # fmt: skip
        self.parallel_output, self.max_distance = parallel_output, relative_attention_max_distance
        self.num_buckets = relative_attention_num_buckets if relative else 0
        specs = transformer_encoder_layer_spec, transformer_decoder_layer_spec
        encoder_depth, depth, length = encoder_config.num_layers, _depth(specs[1], config), max_sequence_length
        described = describe_t5(
            encoder_config, self.vocabulary, EncoderDecoder(length, length, depth), max_sequence_length=length,
            specs=specs,
        )  # fmt: skip
        if branches is None:
            branches = self.branches_of_this_stage(described)
        of_encoder = sum(map(len, described.costs.names[:encoder_depth]))
        with self.construction():
            if pre_process and self.num_buckets:
                tables = (RelativePositionEmbedding(config, self.num_buckets, groups=self.groups) for _ in range(2))
                self.encoder_relative_pos_emb, self.decoder_relative_pos_emb = tables
            self.encoder = TransformerBlock(
                encoder_config, specs[0], groups=self.groups, branches=branches,
                post_layer_norm=branches.start < of_encoder <= branches.stop,
            )  # fmt: skip
            self.decoder = TransformerBlock(
                config, specs[1], num_layers=depth, first_number=encoder_depth + 1, groups=self.groups,
                branches=range(branches.start - of_encoder, branches.stop - of_encoder),
                post_layer_norm=post_process,
            )  # fmt: skip
            if post_process:
                biased = share_embeddings_and_output_weights and not config.scale_decoder_outputs
                self.lm_head = T5LMHead(self.build_output_layer(bias=biased))

    @property
    def output_layer(self) -> VocabParallelOutput:  # type: ignore[override]
        """That of :attr:`lm_head`."""
        return self.lm_head.output_layer

    def message_shapes(self, lengths: tuple[int, int], micro_batch_size: int) -> list[tuple[int, ...]]:
        """Shapes of what travels between stages, given the whole ``lengths`` of encoder and decoder."""
        ranks, hidden = self.groups.cp.size * self._stream_split.size, self.config.hidden_size
        shapes: list[tuple[int, ...]] = [(length // ranks, micro_batch_size, hidden) for length in lengths]
        if self.num_buckets:
            shapes += 2 * [(self.num_buckets, self.config.num_attention_heads // self.groups.tp.size)]
        return shapes

    def set_input_tensor(self, input_tensor: Any) -> None:
        """The tensors of :class:`Streams` that the previous pipeline stage sent, for the next ``forward``."""
        self._input_tensor = None if input_tensor is None else Streams(*input_tensor)

    def forward(
        self,
        encoder_input_ids: Tensor,
        decoder_input_ids: Tensor,
        encoder_attn_mask: Tensor | None = None,
        lm_labels: Tensor | None = None,
        *,
        encoder_lengths: Tensor | None = None,
        sample_index: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        output_encoder_hidden_only: bool = False,
    ) -> Tensor | Streams:
        """Logits [b, s, v] (-inf for padded entries), or losses fp32 [b, s] of every label. On a pipeline stage other
        than the last: :class:`Streams`.

        Args:
            encoder_input_ids: int64 [b, e]; under context parallelism this rank's tokens, as all that is [b, ...].
            decoder_input_ids: int64 [b, s]; padding behind its tokens is hidden from them by causality.
            encoder_attn_mask: int or bool [b, e] of *whole* sequences, 1 for tokens and 0 for the padding behind them.
                None: no padding, or ``encoder_lengths`` says where it is.
            lm_labels: int64 [b, s]; a valid id also where the loss does not count.
            encoder_lengths: int [b], tokens before the padding, at least 1 in each row; best on the host.
            sample_index: int64 [b], the samples' places in the whole run, on which dropout masks depend.
            encoder_hidden_states: [e, b, h], what ``output_encoder_hidden_only`` returned for the same encoder tokens:
                they are not encoded again. Both are for a model of one pipeline stage.

        Raises:
            ValueError: padding of the encoder that is not behind all tokens, or nothing else in a row.
        """
        if encoder_attn_mask is not None:
            encoder_lengths = lengths_of_mask(encoder_attn_mask)
        (batch, length), (_, target_length) = encoder_input_ids.shape, decoder_input_ids.shape
        device = encoder_input_ids.device
        samples = self.samples(batch, sample_index, device)
        source, target = (self.forward_context(ids, samples) for ids in (encoder_input_ids, decoder_input_ids))
        if encoder_lengths is not None:
            whole, whole_target = (each * self.groups.cp.size for each in (length, target_length))
            own, keys = _documents(encoder_lengths, whole, whole_target, device)
            source, target = replace(source, packed_seq_params=own), replace(target, encoder_documents=keys)
        if self.pre_process:
            streams = self._embedded((encoder_input_ids, source), (decoder_input_ids, target))
        else:
            streams = self.received
        source = self._with_bias(source, streams.encoder_table, self.encoder, length)
        encoded = self.encoder(streams.encoder, source) if encoder_hidden_states is None else encoder_hidden_states
        if output_encoder_hidden_only:
            return encoded
        target = self._with_bias(target, streams.decoder_table, self.decoder, target_length)
        decoded = self.decoder(streams.decoder, replace(target, encoder_output=encoded))
        if self.post_process:
            if self.config.scale_decoder_outputs:
                decoded = decoded * self.config.hidden_size**-0.5
            return self.outputs(decoded, lm_labels)
        return streams._replace(encoder=encoded, decoder=decoded).to(self.encoder.stream_dtype)

    def _embedded(self, *inputs: tuple[Tensor, ForwardContext]) -> Streams:
        """Streams at the first stage, from the ids [b, .] of both stacks."""
        encoder, decoder = (
            self.embedding(ids, self.local_positions(ids.shape[1], ids.device).expand(ids.shape), context.dropout)
            for ids, context in inputs
        )
        if not self.num_buckets:
            return Streams(encoder, decoder)
        return Streams(encoder, decoder, self.encoder_relative_pos_emb.table, self.decoder_relative_pos_emb.table)

    def _with_bias(
        self, context: ForwardContext, table: Tensor | None, stack: TransformerBlock, length: int
    ) -> ForwardContext:  # fmt: skip
        """``context`` with the relative positions of a stack of which there are layers here."""
        if table is None or not len(stack.layers):
            return context
        whole, both = length * self.groups.cp.size, stack is self.encoder
        bias = position_bias(table, whole, max_distance=self.max_distance, bidirectional=both)
        return replace(context, position_bias=bias)


def _depth(spec: LayerSpec, config: TransformerConfig) -> int:
    return config.num_layers if isinstance(spec, ModuleSpec) else len(spec.layer_specs)


def _documents(
    lengths: Tensor, length: int, target_length: int, device: torch.device
) -> tuple[PackedSeqParams | None, PackedSeqParams | None]:  # fmt: skip
    """What the encoder's tokens, and what the decoder's, see of the encoder's; None for both where there is no
    padding, which only the host can know."""
    own = PackedSeqParams.of_padding(lengths, length)
    return own and own.on(device), own and PackedSeqParams.of_keys(lengths, target_length, length).on(device)
