"""Decoder-only language models: GPT-2 and GPT-3, LLaMA, Qwen and their relatives.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import Llama3Scaling
from megatron.core.config.errors import UserError
from megatron.core.config.moe import has_side_losses
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.common.language_module import LanguageModule, PositionEmbeddingType, Positions, Vocabulary
from megatron.core.models.gpt_description import describe_gpt
from megatron.core.statistics import modules_with_statistics
from megatron.core.transformer import multi_token_prediction as prediction
from megatron.core.transformer.side_losses import SideLosses
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules


class GPTModel(LanguageModule):
    """Token ids to logits, or to per-token losses where labels are given.

    ``vocab_size`` is the true size; it is stored padded to a multiple of ``make_vocab_size_divisible_by``, and the
    padding takes part in nothing. Initial weights are functions of ``seed`` (``config.seed``) and their names; with
    ``config.perform_initialization`` off, weights are zero and norms are the identity, for a checkpoint to fill.
    On a pipeline stage the model holds what ``pipeline_parallel.stages`` gives to this rank and ``vp_stage`` (its chunk
    of an interleaved schedule), or ``layer_range`` (global indices of whole layers), or ``branches`` (counted from 0
    through all layers).
    The model is built on ``config.use_cpu_initialization``'s device: the CPU, else the current GPU if there is one.
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
    ) -> None:
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
            branches = self.branches_of_this_stage(described, layer_range)
        self.max_sequence_length, self.parallel_output = max_sequence_length, parallel_output
        self._loss_scale: Tensor | None = None
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

    def set_loss_scale(self, scale: Tensor | None) -> None:
        """What the main loss is multiplied by before its backward pass (0-d; None: 1), for losses inside the model."""
        self._loss_scale = scale

    def check_loss(self, num_tokens: Tensor | None) -> None:
        """Refuses a main loss beside which losses inside the model would have a wrong weight. ``num_tokens``: how many
        it sums up; None: it is a mean. Of the first micro-batch alone, as the host waits for the device."""
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

    def _side_losses(self, batch: int, loss_mask: Tensor | None, device: torch.device) -> SideLosses | None:
        """With a ``loss_mask`` the main loss is taken for a sum over the tokens that count, else for a mean over those
        of this rank."""
        if has_side_losses(self.config):
            self._masked_tokens = None if loss_mask is None else loss_mask.sum()
        if not self._has_side_losses or not self.training or not torch.is_grad_enabled():
            return None
        scale = self._loss_scale
        if scale is None:
            scale = torch.ones((), device=device)
        if loss_mask is None:
            return SideLosses(torch.full((batch,), self.groups.cp.size / batch, device=device), scale)
        tokens = loss_mask.sum(1, dtype=torch.float32)
        if self.groups.cp.size > 1:
            dist.all_reduce(tokens, group=self.groups.cp.handle)
        return SideLosses(tokens, scale)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        sample_index: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [b, s, v], with -inf for padded entries, or per-token losses fp32 [b, s] of int64 ``labels`` [b, s].

        On a pipeline stage other than the last: hidden states [s, b, h]. ``attention_mask`` (bool, True where hidden)
        adds to causality; ``packed_seq_params`` keeps documents apart; ``sample_index`` int64 [b] are the samples'
        places in the whole training run, on which dropout masks depend. Under context parallelism s counts this
        rank's tokens (``attention/context_parallel/zigzag.py``); ``position_ids`` and document boundaries count tokens
        of the whole sequences.
        ``loss_mask`` [b, s]: which losses the caller sums up, for losses inside the model; those returned are of every
        token.
        """
        batch = len(input_ids)
        side_losses = self._side_losses(batch, loss_mask, input_ids.device)
        context = self.forward_context(
            input_ids, sample_index, packed_seq_params, attention_mask=attention_mask, side_losses=side_losses
        )
        if self.pre_process:
            hidden_states = self.embedding(input_ids, position_ids, context.dropout)
        else:
            hidden_states = self.received
        hidden_states = self.decoder(hidden_states, context)
        if not self.post_process:
            return hidden_states
        if self.mtp is None or labels is None or side_losses is None:
            return self.outputs(hidden_states, labels)
        tokens = prediction.shifted_tokens(
            (input_ids, position_ids, labels), loss_mask, self.mtp.num_depths, self.groups.cp, packed_seq_params
        )
        embeddings = [self.embedding(each.input_ids, each.position_ids, context.dropout) for each in tokens]
        later = self.mtp(hidden_states, embeddings, context)
        # one call for all: where the weight is the embedding's, its gradient from here is then in ``main_grad`` before
        # any of the look-ups announces it
        all_labels = torch.cat([labels, *(each.labels for each in tokens)])
        losses, *later_losses = self.outputs(torch.cat([hidden_states, *later], dim=1), all_labels).split(batch)
        return self.mtp.attach(losses, later_losses, tokens, loss_mask, side_losses.scale)
