"""Decoder-only language models: GPT-2 and GPT-3, LLaMA, Qwen and similar models.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron import serve_other_names
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import Llama3Scaling
from megatron.core.config.errors import UserError
from megatron.core.config.moe import has_side_losses
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
from megatron.core.statistics import modules_with_statistics
from megatron.core.transformer import multi_token_prediction as prediction
from megatron.core.transformer.aux_losses import AuxLossWeights
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
        self._loss_scale: Tensor | None = None
        self._loss_is_mean = False
        self._masked_tokens: Tensor | None = None
        self._loss_is_checked = False
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

    def set_loss_scale(self, scale: Tensor | None, is_mean: bool = False) -> None:
        """Set the factor that the schedule applies to the main loss before backward (0-d; None: 1), for auxiliary
        losses.

        ``is_mean``: the main loss is a mean even if ``forward`` gets a ``loss_mask``, which then does not weight
        tokens.
        """
        self._loss_scale, self._loss_is_mean = scale, is_mean

    def check_loss(self, num_tokens: Tensor | None) -> None:
        """Raise UserError if ``loss_func`` and ``loss_mask`` would give auxiliary losses a wrong weight:
        ``num_tokens``, which the main loss sums over (None: it is a mean), must equal the last ``forward``'s sum of
        ``loss_mask`` (None if that was None) to 1e-3. Does nothing without auxiliary losses and after the first call,
        because reading the counts waits for the device."""
        if self._loss_is_checked or not has_side_losses(self.config):
            return
        self._loss_is_checked, told = True, self._masked_tokens
        if num_tokens is None and told is None:
            return
        if num_tokens is None or told is None or not math.isclose(float(num_tokens), float(told), rel_tol=1e-3):
            have = "a mean" if num_tokens is None else f"a sum over {float(num_tokens):g} tokens"
            want = "none, as of a mean" if told is None else f"that of {float(told):g} tokens"
            raise UserError(
                f"losses of experts would have a wrong weight: loss_func returns {have}, and the model's loss_mask was "
                f"{want}; pass the mask of this rank's tokens, which the sum is over, or for a mean loss_mask=None"
            )

    def _side_losses(self, batch: int, loss_mask: Tensor | None, device: torch.device) -> AuxLossWeights | None:
        """Return token weights and the scale of auxiliary losses; None in evaluation, without gradients or without such
        losses. With ``loss_mask`` the main loss is a sum over its tokens (all-reduced over context parallelism), else a
        mean over this rank's tokens. Also stores the sum of the mask for :meth:`check_loss`."""
        loss_mask = None if self._loss_is_mean else loss_mask
        if has_side_losses(self.config):
            self._masked_tokens = None if loss_mask is None else loss_mask.sum()
        if not self._has_side_losses or not self.training or not torch.is_grad_enabled():
            return None
        scale = self._loss_scale
        if scale is None:
            scale = torch.ones((), device=device)
        if loss_mask is None:
            return AuxLossWeights(torch.full((batch,), self.layout.group.size / batch, device=device), scale)
        return AuxLossWeights(self.layout.sum(loss_mask.sum(1, dtype=torch.float32)), scale)

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
    ) -> Tensor:
        """Return logits [b, s, v], with -inf for padded entries, or fp32 losses [b, s] of int64 ``labels`` [b, s].
        Losses of negative labels are finite and meaningless: mask them. In training, backward also differentiates the
        auxiliary losses, and with labels the multi-token prediction losses. Pipeline stages other than the last return
        hidden states [s, b, h].

        Later stages accept None for ``input_ids`` and ``position_ids``, except the last one with multi-token
        prediction; models without learned positions need no ``position_ids``. ``attention_mask`` (bool, True where
        hidden) is combined with causality; ``packed_seq_params`` separates documents. ``sample_index`` int64 [b] holds
        the samples' indices in the run, on which dropout masks depend. Under context parallelism s counts this rank's
        tokens (``attention/token_layout.py``); ``position_ids`` and document boundaries refer to the full sequences.
        ``loss_mask`` [b, s] weights the auxiliary losses only: the caller must apply it to the returned losses."""
        batch, _, device = self.local_shape(input_ids)
        aux_losses = self._side_losses(batch, loss_mask, device)
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
