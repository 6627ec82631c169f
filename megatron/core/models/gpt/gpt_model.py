"""Decoder-only language models: GPT-2 and GPT-3, LLaMA, Qwen and similar models.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron import serve_other_names
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import Llama3Scaling
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.common.language_module import (
    LanguageModule,
    PositionEmbeddingType,
    Positions,
    Vocabulary,
    program_groups,
)
from megatron.core.models.gpt.description import describe_gpt
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.statistics import modules_with_statistics
from megatron.core.transformer import multi_token_prediction as prediction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules


class GPTModel(LanguageModule):
    """Decoder-only model: returns logits, or per-token losses if labels are passed.

    ``vocab_size`` is the unpadded size. The stored size is padded to a multiple of ``make_vocab_size_divisible_by``;
    the padding takes part in no computation. Initial weights are functions of ``seed`` (default ``config.seed``) and
    the parameter names. Without ``config.perform_initialization``, weights are zero and norms are the identity, to be
    loaded from a checkpoint. A pipeline stage holds the branches that ``pipeline_parallel.stages`` assigns to this rank
    and ``vp_stage`` (its chunk of an interleaved schedule). ``layer_range`` (global layer indices) or ``branches``
    (counted from 0 over all layers) overrides that. The model is built on the CPU with
    ``config.use_cpu_initialization`` or without a GPU, else on the current GPU. ``pg_collection`` must hold the groups
    of the running program.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        parallel_output: bool = True,
        fp16_lm_cross_entropy: bool = False,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbeddingType = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: prediction.MultiTokenPredictionBlockSubmodules | None = None,
        *,
        make_vocab_size_divisible_by: int = 128,
        seed: int | None = None,
        groups: ProcessGroups | None = None,
        layer_range: range | None = None,
        branches: range | None = None,
        vp_stage: int | None = None,
        pg_collection: Any = None,
        logit_dtype: torch.dtype | None = None,
    ) -> None:
        """Build this stage's embedding, decoder layers, output layer and prediction depths; the last stage with
        ``mtp_block_spec`` also has an embedding. ``fp16_lm_cross_entropy`` is ignored. Raises UserError for an
        unavailable ``logit_dtype`` or only one of ``mtp_block_spec`` and ``config.mtp_num_layers``, ValueError for both
        ``layer_range`` and ``branches``."""
        groups = program_groups(pg_collection, groups)
        if logit_dtype not in (None, torch.float32):
            raise UserError(f"logit_dtype {logit_dtype}: not available; remove it")
        super().__init__(
            config,
            Vocabulary(vocab_size, share_embeddings_and_output_weights, make_vocab_size_divisible_by),
            Positions(
                max_sequence_length, position_embedding_type, rotary_percent, rotary_base, seq_len_interpolation_factor,
                Llama3Scaling(rope_scaling_factor) if rope_scaling else None,
            ),
            pre_process=pre_process, post_process=post_process, seed=seed, groups=groups, vp_stage=vp_stage,
        )  # fmt: skip
        if (mtp_block_spec is None) is not (config.mtp_num_layers is None):
            raise UserError(
                f"mtp_num_layers {config.mtp_num_layers} goes with mtp_block_spec=get_gpt_mtp_block_spec(config, spec),"
                f" not with {mtp_block_spec!r:.40}: give both, or neither"
            )
        if layer_range is not None and branches is not None:
            raise ValueError("layer_range and branches both say what this stage holds: give one of them")
        if branches is None:
            described = describe_gpt(
                config, vocab_size=vocab_size, seq_length=max_sequence_length, max_sequence_length=max_sequence_length,
                spec=transformer_layer_spec,
            )  # fmt: skip
            branches = self.stage_branches(described, layer_range)
        self.max_sequence_length, self.parallel_output = max_sequence_length, parallel_output
        self.mtp, predicts_on = None, mtp_block_spec is not None
        with self.construction(embedding=pre_process or (post_process and predicts_on), tie_embedding=predicts_on):
            self.decoder = TransformerBlock(
                config, transformer_layer_spec, branches=branches, post_layer_norm=post_process, groups=self.groups
            )
            if post_process:
                self.output_layer = self.build_output_layer()
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
        packed_seq_params: PackedSeqParams | None = None,
        sample_index: Tensor | None = None,
        loss_mask: Tensor | None = None,
        main_loss: MainLoss | None = None,
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
        """
        batch, _, device = self.local_shape(input_ids)
        aux_losses = None
        if self._has_side_losses and self.training and torch.is_grad_enabled():
            aux_losses = (main_loss or MainLoss()).aux_weights(loss_mask, device, batch, self.layout.group)
        context = self.forward_context(
            input_ids, sample_index, packed_seq_params, attention_mask=attention_mask, aux_losses=aux_losses
        )
        if position_ids is None and input_ids is not None:
            position_ids = self._default_positions(input_ids, context.layout)
        if self.pre_process:
            assert input_ids is not None
            hidden_states = self.embedding(input_ids, position_ids, context.dropout)
        else:
            hidden_states = self.received
        hidden_states = self.decoder(hidden_states, context)
        if not self.post_process:
            return hidden_states
        if self.mtp is None or labels is None or aux_losses is None:
            return self.outputs(hidden_states, labels)
        if input_ids is None or position_ids is None:
            raise UserError("input_ids: None, but multi-token prediction embeds tokens; pass them and position_ids")
        tokens = prediction.shifted_tokens(
            (input_ids, position_ids, labels), loss_mask, self.mtp.num_depths, context.layout
        )
        embeddings = [self.embedding(each.input_ids, each.position_ids, context.dropout) for each in tokens]
        later = self.mtp(hidden_states, embeddings, context)
        # one call for all depths: the gradient of a tied weight is then complete in ``main_grad`` before any look-up's
        # backward marks it as ready
        all_labels = torch.cat([labels, *(each.labels for each in tokens)])
        losses, *later_losses = self.outputs(torch.cat([hidden_states, *later], dim=1), all_labels).split(batch)
        return self.mtp.attach(losses, later_losses, tokens, loss_mask, aux_losses.scale)


serve_other_names(__name__)
