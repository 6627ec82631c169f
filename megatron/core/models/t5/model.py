"""T5: an encoder of text with missing spans and a decoder that predicts the spans.

Both stacks form one list of layers, the encoder's first, which is split into pipeline stages. Stages send the hidden
states of both stacks (:class:`Streams`), so that only the first stage computes embeddings.

Legend: e, s sequence of encoder and decoder (this rank's positions), b batch, h hidden, v vocabulary entries
of this rank (stored, padding included), n buckets, a heads (local)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.attention.packed_seq_params import PackedSeqParams, mask_lengths
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.common.language_module import LanguageModule
from megatron.core.models.common.relative_positions import RelativePositionEmbedding, position_bias
from megatron.core.models.common.settings import LanguageModelSettings
from megatron.core.models.t5.description import EncoderDecoder, describe_t5
from megatron.core.models.t5.masks import check_masks, token_mask
from megatron.core.statistics import modules_with_statistics
from megatron.core.tensor_parallel.layers import VocabParallelOutput
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

LayerSpec = ModuleSpec | TransformerBlockSubmodules


class Streams(NamedTuple):
    """Tensors that one pipeline stage sends to the next."""

    encoder: Tensor
    """[e, b, h]; after the encoder's last layer, the normalized output."""
    decoder: Tensor
    """[s, b, h]."""
    encoder_table: Tensor | None = None
    """[n, a], relative-position table, which only the first stage stores; None without relative positions."""
    decoder_table: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Streams:
        """Cast all tensors to ``dtype``, the dtype of pipeline messages."""
        return Streams._make(None if tensor is None else tensor.to(dtype) for tensor in self)


class T5LMHead(nn.Module):
    """Container that gives the output layer its checkpoint name, ``lm_head.output_layer``."""

    def __init__(self, output_layer: VocabParallelOutput) -> None:
        super().__init__()
        self.output_layer = output_layer


class T5Model(LanguageModule):
    """T5 model: returns logits of the decoder's tokens, or per-token losses if labels are passed.

    ``config`` is the decoder's, ``encoder_config`` the encoder's; they differ only in ``num_layers``. Pipeline stages
    are balanced for sequences of ``max_sequence_length``, unless ``settings.branches`` (a range over the branches of
    both stacks) sets this stage's layers."""

    def __init__(
        self,
        config: TransformerConfig,
        settings: LanguageModelSettings,
        encoder_config: TransformerConfig,
        transformer_encoder_layer_spec: LayerSpec,
        transformer_decoder_layer_spec: LayerSpec,
        *,
        add_encoder: bool = True,
        add_decoder: bool = True,
    ) -> None:
        """Build this stage's part of both stacks and of ``lm_head``; relative positions are on the first stage. Raises
        UserError if ``add_encoder`` or ``add_decoder`` is False."""
        if not (add_encoder and add_decoder):
            raise UserError("add_encoder and add_decoder: must be True; a pipeline stage has a range of both stacks")
        relative = settings.position_embedding_type == "relative"
        super().__init__(config, replace(settings, position_embedding_type="none") if relative else settings)
        self.max_distance = settings.relative_attention_max_distance
        self.num_buckets = settings.relative_attention_num_buckets if relative else 0
        specs = transformer_encoder_layer_spec, transformer_decoder_layer_spec
        encoder_depth, depth, length = encoder_config.num_layers, _depth(specs[1], config), settings.max_sequence_length
        described = describe_t5(
            encoder_config,
            settings.vocabulary,
            EncoderDecoder(length, length, depth),
            max_sequence_length=length,
            specs=specs,
        )
        branches = self.stage_branches(described) if settings.branches is None else settings.branches
        of_encoder = sum(map(len, described.costs.names[:encoder_depth]))
        with self.construction():
            if self.pre_process and self.num_buckets:
                tables = (RelativePositionEmbedding(config, self.num_buckets, groups=self.groups) for _ in range(2))
                self.encoder_relative_pos_emb, self.decoder_relative_pos_emb = tables
            self.encoder = TransformerBlock(
                encoder_config,
                specs[0],
                groups=self.groups,
                branches=branches,
                post_layer_norm=branches.start < of_encoder <= branches.stop,
            )
            self.decoder = TransformerBlock(
                config,
                specs[1],
                num_layers=depth,
                first_number=encoder_depth + 1,
                groups=self.groups,
                branches=range(branches.start - of_encoder, branches.stop - of_encoder),
                post_layer_norm=self.post_process,
            )
            for kind, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
                for index, layer in zip(stack.layers.indices, stack.layers):
                    for each in modules_with_statistics([layer]):  # "layer 3" would not tell the stack
                        each.statistics.label = f"{kind} layer {index + 1}"
            if self.post_process:
                biased = self.share_embeddings_and_output_weights and not config.scale_decoder_outputs
                self.lm_head = T5LMHead(self.build_output_layer(bias=biased))

    @property
    def output_layer(self) -> VocabParallelOutput:  # type: ignore[override]
        """Output layer of :attr:`lm_head`."""
        return self.lm_head.output_layer

    def message_shapes(self, lengths: tuple[int, int], micro_batch_size: int) -> list[tuple[int, ...]]:
        """Return the local shapes of :class:`Streams` for the full (encoder, decoder) ``lengths``."""
        ranks, hidden = self.layout.group.size * self.layout.stream.size, self.config.hidden_size
        shapes: list[tuple[int, ...]] = [(length // ranks, micro_batch_size, hidden) for length in lengths]
        if self.num_buckets:
            shapes += 2 * [(self.num_buckets, self.config.num_attention_heads // self.groups.tp.size)]
        return shapes

    def set_input_tensor(self, input_tensor: Any) -> None:
        self._input_tensor = None if input_tensor is None else Streams(*input_tensor)

    def forward(
        self,
        encoder_input_ids: Tensor,
        decoder_input_ids: Tensor,
        encoder_attn_mask: Tensor | None = None,
        decoder_attn_mask: Tensor | None = None,
        encoder_decoder_attn_mask: object = None,
        lm_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        output_encoder_hidden_only: bool = False,
        *,
        encoder_lengths: Tensor | None = None,
        sample_index: Tensor | None = None,
    ) -> Tensor | Streams:
        """Return logits [b, s, v] (-inf for padded entries) or, with labels, losses fp32 [b, s] of every label.
        Pipeline stages other than the last return :class:`Streams`.

        Args:
            encoder_input_ids: int64 [b, e]. With context parallelism e and s count this rank's tokens, here and below.
            decoder_input_ids: int64 [b, s]; causality hides padding after the tokens.
            encoder_attn_mask: int or bool [b, e] of *full* sequences, 1 for tokens and 0 for the padding after them; or
                Megatron-LM's form, [b, 1, e, e], [b, 1, 1, e] or, with a cross mask, [b, e], True where hidden. None:
                no padding, or ``encoder_lengths`` describes it.
            decoder_attn_mask: [b, 1, s, s], [b, 1, 1, s] or [b, s], True where hidden. It must be causal, with padding
                after all tokens: the model always computes that and only checks the mask.
            encoder_decoder_attn_mask: [b, 1, s, e], True where hidden, or a pair of masks of both sequences. It must
                hide exactly the encoder's padding; it is only checked.
            lm_labels: int64 [b, s]. Losses of negative labels are finite and meaningless: mask them.
            encoder_hidden_states: [e, b, h], a result of ``output_encoder_hidden_only`` for the same tokens; skips the
                encoder. Both options require a single pipeline stage.
            encoder_lengths: int [b], tokens before the padding, at least 1 per row; on the CPU it avoids a sync.
            sample_index: int64 [b], indices of the samples in the run; dropout masks depend on them.

        Raises:
            ValueError: encoder padding is not after all tokens, or a row has only padding; another mask is not as
                required."""
        if encoder_attn_mask is not None and encoder_decoder_attn_mask is not None and encoder_attn_mask.dim() == 2:
            encoder_attn_mask = encoder_attn_mask[:, None]
        if decoder_attn_mask is not None and decoder_attn_mask.dim() == 2:
            decoder_attn_mask = decoder_attn_mask[:, None]
        encoder_tokens = None if encoder_attn_mask is None else token_mask(encoder_attn_mask)
        check_masks(decoder_attn_mask, encoder_decoder_attn_mask, encoder_tokens)
        if encoder_tokens is not None:
            encoder_lengths = mask_lengths(encoder_tokens)
        (batch, length), (_, target_length) = encoder_input_ids.shape, decoder_input_ids.shape
        device = encoder_input_ids.device
        samples = self.samples(batch, sample_index, device)
        source, target = (self.forward_context(ids, samples) for ids in (encoder_input_ids, decoder_input_ids))
        if encoder_lengths is not None:
            whole, whole_target = (self.layout.full_length(each) for each in (length, target_length))
            own, keys = _documents(encoder_lengths, whole, whole_target, device)
            source = replace(source, layout=source.layout.with_documents(own))
            target = replace(target, encoder_documents=keys)
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
        """Embed the ids [b, s] of encoder and decoder on the first stage, each with its context's dropout. Returns the
        streams [s, b, h] and, with relative positions, the bias tables, which are sent along the pipeline."""
        encoder, decoder = (
            self.embedding(ids, context.layout.positions(ids.shape[1], ids.device).expand(ids.shape), context.dropout)
            for ids, context in inputs
        )
        if not self.num_buckets:
            return Streams(encoder, decoder)
        return Streams(encoder, decoder, self.encoder_relative_pos_emb.table, self.decoder_relative_pos_emb.table)

    def _with_bias(
        self, context: ForwardContext, table: Tensor | None, stack: TransformerBlock, length: int
    ) -> ForwardContext:
        """Return ``context`` with the relative-position bias of ``stack`` over full sequences, bidirectional for the
        encoder; unchanged without a ``table`` or layers of the stack."""
        if table is None or not len(stack.layers):
            return context
        full, both = context.layout.full_length(length), stack is self.encoder
        bias = position_bias(table, full, max_distance=self.max_distance, bidirectional=both)
        return replace(context, position_bias=bias)


def _depth(spec: LayerSpec, config: TransformerConfig) -> int:
    return config.num_layers if isinstance(spec, ModuleSpec) else len(spec.layer_specs)


def _documents(
    lengths: Tensor, length: int, target_length: int, device: torch.device
) -> tuple[PackedSeqParams | None, PackedSeqParams | None]:
    """Return the encoder's self-attention mask and the decoder's cross-attention mask as packed documents on
    ``device``; both None without padding, which only lengths on the CPU can show."""
    mask = PackedSeqParams.of_padding(lengths, length)
    return mask and mask.on(device), mask and PackedSeqParams.of_keys(lengths, target_length, length).on(device)
