"""Decoder-only language models: GPT-2 and GPT-3, LLaMA, Qwen and their relatives.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import Llama3Scaling, RotaryEmbedding, latent_rotary, yarn_scaling
from megatron.core.config.errors import UserError
from megatron.core.config.moe import has_side_losses
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.description.model import ModelDescription
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.common.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt_description import describe_gpt
from megatron.core.pipeline_parallel.stages import branches_of_layers, pipeline_stages
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.sharding.placement import ParameterSpec, Partial, initialize_parameters
from megatron.core.statistics import modules_with_statistics
from megatron.core.tensor_parallel.layers import VocabParallelOutput
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import embedding_init, weight_init
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    shifted_tokens,
)
from megatron.core.transformer.side_losses import SideLosses
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

PositionEmbeddingType = Literal["learned_absolute", "rope", "yarn", "none"]


class GPTModel(MegatronModule):
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
        mtp_block_spec: MultiTokenPredictionBlockSubmodules | None = None,
        *,
        make_vocab_size_divisible_by: int = 128,
        seed: int | None = None,
        groups: ProcessGroups | None = None,
        layer_range: range | None = None,
        branches: range | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        if (mtp_block_spec is None) is not (config.mtp_num_layers is None):
            raise UserError(
                f"mtp_num_layers {config.mtp_num_layers} goes with mtp_block_spec=get_gpt_mtp_block_spec(config, spec),"
                f" not with {mtp_block_spec!r:.40}: give both, or neither"
            )
        seed = config.seed if seed is None else seed
        self.groups = groups or parallel_state.get_process_groups()
        self.vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage
        if layer_range is not None and branches is not None:
            raise ValueError("layer_range and branches both say what this stage holds: give one of them")
        if branches is None:
            described = describe_gpt(
                config, vocab_size=vocab_size, seq_length=max_sequence_length, max_sequence_length=max_sequence_length,
                spec=transformer_layer_spec,
            )  # fmt: skip
            branches = self._branches_of_this_stage(described, layer_range)
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process, self.parallel_output = pre_process, post_process, parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.divisible_by = make_vocab_size_divisible_by
        self.dropout_stream = DropoutStream(seed)
        self._stream_split = self.groups.stream(config.sequence_parallel)
        """Over which ranks the residual stream's positions are split."""
        self._input_tensor: Tensor | None = None
        self._loss_scale: Tensor | None = None
        self._masked_tokens: Tensor | None = None
        self._loss_is_checked = False
        self._forward_calls = 0
        self.rotary_pos_emb = _rotary(
            config, position_embedding_type, max_sequence_length, rotary_percent, rotary_base,
            Llama3Scaling(rope_scaling_factor) if rope_scaling else None, seq_len_interpolation_factor,
        )  # fmt: skip
        self.rotary_pos_emb_local = None
        if self.rotary_pos_emb is not None and config.rotary_base_local is not None:
            self.rotary_pos_emb_local = RotaryEmbedding(
                config.kv_channels, rotary_percent, rotary_base=config.rotary_base_local, dtype=config.params_dtype
            )
        with torch.device(_construction_device(config)):
            learned = position_embedding_type == "learned_absolute"
            self._build(transformer_layer_spec, branches, learned, mtp_block_spec)
            if config.perform_initialization:
                initialize_parameters(self, seed, self.groups)
        self._has_side_losses = any(modules_with_statistics([self]))

    def _branches_of_this_stage(self, described: ModelDescription, layers: range | None) -> range:
        """Those of ``layers``, or what is between ``pre_process`` and ``post_process`` on this pipeline rank."""
        costs, pp = described.costs, self.groups.pp
        if layers is not None:
            return branches_of_layers(layers, costs.names)
        stages = pipeline_stages(self.config, costs)
        if self.config.pipeline_model_parallel_size != pp.size:
            raise UserError(
                f"config.pipeline_model_parallel_size is {self.config.pipeline_model_parallel_size}, but there are "
                f"{pp.size} pipeline ranks: give both the same number, or layer_range"
            )
        return stages[pp.rank + (self.vp_stage or 0) * pp.size].branches

    def _build(
        self,
        spec: ModuleSpec | TransformerBlockSubmodules,
        branches: range,
        learned_positions: bool,
        mtp_spec: MultiTokenPredictionBlockSubmodules | None,
    ) -> None:
        config, self.mtp = self.config, None
        if self.pre_process or (self.post_process and mtp_spec is not None):
            self.embedding = LanguageModelEmbedding(
                config, self.vocab_size, self.max_sequence_length, learned_positions=learned_positions,
                divisible_by=self.divisible_by, groups=self.groups,
            )  # fmt: skip
        self.decoder = TransformerBlock(
            config, spec, branches=branches, post_layer_norm=self.post_process, groups=self.groups
        )
        if self.post_process:
            tied = self.share_embeddings_and_output_weights
            self.output_layer = VocabParallelOutput(
                config.hidden_size, self.vocab_size, config=config,
                init_method=embedding_init(config) if tied else weight_init(config),
                weight_is_shared=tied and self.has_embedding,
                tied_to="embedding.word_embeddings.weight" if tied else None,
                divisible_by=self.divisible_by, groups=self.groups,
            )  # fmt: skip
            self.output_layer.soft_cap = config.final_logit_softcapping
            if self.output_layer.weight is None:
                self.output_layer.borrowed = (self.embedding.word_embeddings.weight,)
            if mtp_spec is not None:
                self.mtp = MultiTokenPredictionBlock(config, mtp_spec, groups=self.groups)
        self._tie_over_stages()

    @property
    def has_embedding(self) -> bool:
        """On the first stage, and as a copy where further tokens are predicted."""
        return hasattr(self, "embedding")

    def _tie_over_stages(self) -> None:
        """A weight that the first and the last stage each hold has a partial gradient on either."""
        if self.pre_process == self.post_process:
            return
        weights: dict[str, Any] = {}
        if self.config.mtp_num_layers is not None:
            weights = {f"embedding.{name}": weight for name, weight in self.embedding.named_parameters()}
        elif self.share_embeddings_and_output_weights:
            weights = {"embedding.word_embeddings.weight": self.shared_embedding_or_output_weight()}
        for name, weight in weights.items():
            spec: ParameterSpec = weight.spec
            grad, tied_to = {**spec.grad, "embedding": Partial()}, None if self.pre_process else name
            weight.spec = replace(spec, grad=grad, tied_to=tied_to)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Hidden states [s, b, h] of the previous pipeline stage, for the next ``forward``."""
        self._input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

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

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The tied weight as this stage holds it; None where it holds none."""
        if self.has_embedding:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def _dropout_coordinates(
        self, batch: int, length: int, sample_index: Tensor | None, device: torch.device
    ) -> DropoutCoordinates | None:
        """Without sample indices successive calls count on: masks differ between calls, but are not tied to the
        data."""
        if not self.training:
            return None
        if sample_index is None:
            sample_index = torch.arange(batch, device=device) + self._forward_calls * batch
            self._forward_calls += 1
        positions = zigzag.positions(length * self.groups.cp.size, self.groups.cp.rank, self.groups.cp.size, device)
        local = positions.chunk(self._stream_split.size)[self._stream_split.rank]
        return DropoutCoordinates(self.dropout_stream, sample_index, local)

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
        batch, length = input_ids.shape
        if packed_seq_params is not None:
            packed_seq_params.check(batch, length * self.groups.cp.size)
        dropout = self._dropout_coordinates(batch, length, sample_index, input_ids.device)
        if self.pre_process:
            hidden_states = self.embedding(input_ids, position_ids, dropout)
        else:
            assert self._input_tensor is not None, "set_input_tensor comes before forward on later pipeline stages"
            hidden_states = self._input_tensor
        rotary, rotary_local = (
            None if each is None else each(length, input_ids.device, self.groups.cp)
            for each in (self.rotary_pos_emb, self.rotary_pos_emb_local)
        )
        side_losses = self._side_losses(batch, loss_mask, input_ids.device)
        context = ForwardContext(attention_mask, rotary, packed_seq_params, dropout, side_losses, rotary_local)
        hidden_states = self.decoder(hidden_states, context)
        if not self.post_process:
            return hidden_states
        if self.mtp is None or labels is None or side_losses is None:
            return self._outputs(hidden_states, labels)
        tokens = shifted_tokens(
            (input_ids, position_ids, labels), loss_mask, len(self.mtp.layers), self.groups.cp, packed_seq_params
        )
        embeddings = [self.embedding(each.input_ids, each.position_ids, dropout) for each in tokens]
        later = self.mtp(hidden_states, embeddings, context)
        # one call for all: where the weight is the embedding's, its gradient from here is then in ``main_grad`` before
        # any of the look-ups announces it
        all_labels = torch.cat([labels, *(each.labels for each in tokens)])
        losses, *later_losses = self._outputs(torch.cat([hidden_states, *later], dim=1), all_labels).split(batch)
        return self.mtp.attach(losses, later_losses, tokens, loss_mask, side_losses.scale)

    def _outputs(self, hidden_states: Tensor, labels: Tensor | None) -> Tensor:
        weight = self.output_layer.weight
        if weight is None:
            weight = self.embedding.word_embeddings.weight
        if labels is not None:
            return self.output_layer(hidden_states, weight, labels.transpose(0, 1)).transpose(0, 1).contiguous()
        return self._visible_logits(self.output_layer(hidden_states, weight)).transpose(0, 1).contiguous()

    def _visible_logits(self, logits: Tensor) -> Tensor:
        """Padded entries become -inf, so that no softmax or argmax over the logits sees them."""
        num_local = self.output_layer.num_local
        if num_local < logits.shape[-1]:
            padded = torch.arange(logits.shape[-1], device=logits.device) >= num_local
            logits = logits.masked_fill(padded, -torch.inf)
        return logits if self.parallel_output else gather_from_tensor_model_parallel_region(logits, self.groups.tp)


def _construction_device(config: TransformerConfig) -> torch.device:
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _rotary(
    config: TransformerConfig,
    kind: str,
    max_sequence_length: int,
    percent: float,
    base: float,
    llama3: Llama3Scaling | None,
    interpolation: float | None,
) -> RotaryEmbedding | None:
    """The rotary embedding that a position embedding type names; None for the types without one."""
    if kind not in ("learned_absolute", "rope", "yarn", "none"):
        raise UserError(f"position_embedding_type {kind!r}: GPT models take learned_absolute, rope, yarn or none")
    if config.multi_latent_attention:
        return latent_rotary(config, base, percent)
    if kind not in ("rope", "yarn"):
        return None
    return RotaryEmbedding(
        config.kv_channels, percent, rotary_base=base, interpolation=interpolation, dtype=config.params_dtype,
        scaling=yarn_scaling(config, max_sequence_length) if kind == "yarn" else llama3,
    )  # fmt: skip
