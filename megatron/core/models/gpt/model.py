"""Decoder-only language models: GPT-2 and GPT-3, LLaMA, Qwen and similar models.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.common.language_module import LanguageModule, check_groups
from megatron.core.models.common.settings import LanguageModelSettings
from megatron.core.models.gpt.description import describe_gpt
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.statistics import modules_with_statistics
from megatron.core.transformer import multi_token_prediction as prediction
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules


class GPTModel(LanguageModule):
    """Decoder-only model: returns logits, or per-token losses if labels are passed.

    ``layer_range`` (global layer indices) selects this stage's layers in place of ``settings.branches``.
    ``pg_collection`` must hold the groups of the running program. Programs written for Megatron-LM get the subclass in
    ``compat/models.py``."""

    def __init__(
        self,
        config: TransformerConfig,
        settings: LanguageModelSettings,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        mtp_block_spec: prediction.MultiTokenPredictionBlockSubmodules | None = None,
        *,
        layer_range: range | None = None,
        pg_collection: object = None,
        logit_dtype: torch.dtype | None = None,
    ) -> None:
        """Build this stage's embedding, decoder layers, output layer and prediction depths; the last stage with
        ``mtp_block_spec`` also has an embedding. Raises UserError for an unavailable ``logit_dtype`` or only one of
        ``mtp_block_spec`` and ``config.mtp_num_layers``, ValueError for both ``layer_range`` and ``branches``."""
        check_groups(pg_collection, settings.groups)
        if logit_dtype not in (None, torch.float32):
            raise UserError(f"logit_dtype {logit_dtype}: not available; remove it")
        super().__init__(config, settings)
        if (mtp_block_spec is None) is not (config.mtp_num_layers is None):
            raise UserError(
                f"mtp_num_layers {config.mtp_num_layers} goes with mtp_block_spec=get_gpt_mtp_block_spec(config, spec),"
                f" not with {mtp_block_spec!r:.40}: give both, or neither"
            )
        branches, length = settings.branches, settings.max_sequence_length
        if layer_range is not None and branches is not None:
            raise ValueError("layer_range and branches both say what this stage holds: give one of them")
        if branches is None:
            described = describe_gpt(
                config,
                vocab_size=self.vocab_size,
                seq_length=length,
                max_sequence_length=length,
                spec=transformer_layer_spec,
            )
            branches = self.stage_branches(described, layer_range)
        self.max_sequence_length = length
        self.mtp, predicts_on = None, mtp_block_spec is not None
        embeds = self.pre_process or (self.post_process and predicts_on)
        with self.construction(embedding=embeds, tie_embedding=predicts_on):
            self.decoder = TransformerBlock(
                config, transformer_layer_spec, branches=branches, post_layer_norm=self.post_process, groups=self.groups
            )
            if self.post_process:
                self.output_layer = self.build_output_layer(bias=config.output_layer_bias)
                if mtp_block_spec is not None:
                    self.mtp = prediction.MultiTokenPredictionBlock(config, mtp_block_spec, groups=self.groups)
        self._has_side_losses = any(modules_with_statistics([self]))

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | TokenLayout | None = None,
        sample_index: Tensor | None = None,
        loss_mask: Tensor | None = None,
        main_loss: MainLoss | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return logits [b, s, v], with -inf for padded entries, or fp32 losses [b, s] of int64 ``labels`` [b, s].
        Losses of negative labels are finite and meaningless: mask them. In training, backward also differentiates the
        auxiliary losses, and with labels the multi-token prediction losses. Pipeline stages other than the last return
        hidden states [s, b, h].

        Later stages accept None for ``input_ids`` and ``position_ids``, except the last one with multi-token
        prediction; models without learned positions need no ``position_ids``. ``attention_mask`` (bool, True where
        hidden) is combined with causality; ``packed_seq_params`` separates documents. ``sample_index`` int64 [b] holds
        the samples' indices in the run, on which dropout masks depend. Under context parallelism s counts this rank's
        tokens (``attention/token_layout.py``); ``position_ids`` and document boundaries refer to the full
        sequences. ``loss_mask`` [b, s] weights the auxiliary losses only: the caller must apply it to the returned
        losses. ``main_loss`` says what the caller differentiates; the default is the sum over ``loss_mask``, or without
        a mask the mean of this rank's losses.

        With ``sample_index`` [1, s] one row packs several samples, ``position_ids`` count within each of them, and
        ``packed_seq_params`` separates them. It may be a layout, if other ranks than the context-parallel ranks of the
        program share this micro-batch. ``inputs`` go to :meth:`forward_context` of a subclass."""
        batch, length, device = self.local_shape(input_ids)
        packed = sample_index is not None and sample_index.dim() > 1
        aux_losses = None
        if self._has_side_losses and self.training and torch.is_grad_enabled():
            layout = self.micro_batch_layout(packed_seq_params)
            aux_losses = (main_loss or MainLoss()).aux_weights(loss_mask, device, batch, layout.group)
            if packed and len(aux_losses.tokens_b) > batch:  # of each sample
                aux_losses = aux_losses._replace(samples=layout.sample_numbers(length, device))
        context = self.forward_context(
            input_ids,
            sample_index,
            packed_seq_params,
            position_ids if packed else None,
            attention_mask=attention_mask,
            aux_losses=aux_losses,
            **inputs,
        )
        if position_ids is None and input_ids is not None:
            position_ids = self._default_positions(input_ids, context.layout)
        if self.pre_process:
            assert input_ids is not None
            hidden_states = self.embed(input_ids, position_ids, context)
        else:
            hidden_states = self.received
        hidden_states = self.decoder(hidden_states, context)
        if not self.post_process:
            return hidden_states
        if self.mtp is None or labels is None or aux_losses is None:
            return self.outputs(context.layout.output_rows(hidden_states), labels)
        if input_ids is None or position_ids is None:
            raise UserError("input_ids: None, but multi-token prediction embeds tokens; pass them and position_ids")
        tokens = prediction.shifted_tokens(
            (input_ids, position_ids, labels), loss_mask, self.mtp.num_depths, context.layout, packed
        )
        embeddings = [self.embedding(shifted.input_ids, shifted.position_ids, context.dropout) for shifted in tokens]
        later = self.mtp(hidden_states, embeddings, context)
        # one call for all depths: the gradient of a tied weight is then complete in ``main_grad`` before any look-up's
        # backward marks it as ready
        all_labels = torch.cat([labels, *(shifted.labels for shifted in tokens)])
        losses, *later_losses = self.outputs(torch.cat([hidden_states, *later], dim=1), all_labels).split(batch)
        return self.mtp.attach(losses, later_losses, tokens, loss_mask, aux_losses.scale)

    def embed(self, input_ids: Tensor, position_ids: Tensor | None, context: ForwardContext) -> Tensor:
        """Return the embeddings [s, b, h] of this rank's part of the residual stream; ``position_ids`` are not None
        with learned positions."""
        return self.embedding(input_ids, position_ids, context.dropout)
