"""Base class of language models: pipeline stage, tied embedding and output layer, positions, dropout coordinates,
logits and losses.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import serve_other_names
from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.mup import output_factor
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.description.model import ModelDescription
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.common.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.settings import LanguageModelSettings
from megatron.core.pipeline_parallel.stages import layer_branch_costs, pipeline_stages
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.sharding.placement import ParameterSpec, Partial, initialize_parameters
from megatron.core.tensor_parallel.layers import VocabParallelOutput
from megatron.core.tensor_parallel.operators import gather_from_region
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import embedding_init, weight_init
from megatron.core.transformer.module import MegatronModule


class LanguageModule(MegatronModule):
    """Base class of GPT, BERT and T5 models. Subclasses set ``output_layer`` on stages that have it.

    Initial weights are functions of ``seed`` (default ``config.seed``) and the parameter names. Without
    ``config.perform_initialization``, weights are zero and norms are the identity, to be loaded from a checkpoint. The
    model is built on the CPU with ``config.use_cpu_initialization`` or without a GPU, else on the current GPU."""

    embedding: LanguageModelEmbedding
    output_layer: VocabParallelOutput

    def __init__(self, config: TransformerConfig, settings: LanguageModelSettings) -> None:
        """Set stage, groups, seed, layout and rotary embeddings; build no layers, which subclasses do in
        :meth:`construction`. Raises UserError for an unknown position kind."""
        super().__init__(config)
        self.settings = settings
        self.seed = config.seed if settings.seed is None else settings.seed
        self.groups = settings.groups or parallel_state.get_process_groups()
        self.vp_stage = settings.vp_stage
        if self.vp_stage is None:
            self.vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank()
        self.pre_process, self.post_process = settings.pre_process, settings.post_process
        self.parallel_output, self.vocab_size = settings.parallel_output, settings.vocab_size
        self.share_embeddings_and_output_weights = settings.share_embeddings_and_output_weights
        self.rotary_pos_emb, self.rotary_pos_emb_local = settings.rotary(config), settings.local_rotary(config)
        self.dropout_stream = DropoutStream(self.seed)
        self.layout = TokenLayout.of(self.groups, config.sequence_parallel)
        """Tokens that this rank holds of a micro-batch that brings no layout."""
        self._input_tensor: object = None
        self._forward_calls = 0

    # ---- stages

    def stage_branches(self, described: ModelDescription, layers: range | None = None) -> range:
        """Return the range of branches of ``layers``, or, if None, of this pipeline rank and ``vp_stage``. Raises
        UserError: the configuration and the process groups have different pipeline sizes."""
        costs, pp = described.costs, self.groups.pp
        if layers is not None:
            return layer_branch_costs(layers, costs.names)
        stages = pipeline_stages(self.config, costs)
        if self.config.pipeline_model_parallel_size != pp.size:
            raise UserError(
                f"config.pipeline_model_parallel_size is {self.config.pipeline_model_parallel_size}, but there are "
                f"{pp.size} pipeline ranks: give both the same number, or layer_range"
            )
        return stages[pp.rank + (self.vp_stage or 0) * pp.size].branches

    def set_input_tensor(self, input_tensor: object) -> None:
        """Store the hidden states [s, b, h] received from the previous pipeline stage for the next ``forward``."""
        self._input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def local_shape(self, input_ids: Tensor | None) -> tuple[int, int, torch.device]:
        """Return (batch size, this context-parallel rank's tokens per row, device) of a micro-batch. Without
        ``input_ids`` [b, s], on later pipeline stages of programs that read no data there, the shape is that of the
        received hidden states. Raises UserError on a stage with the embedding."""
        if input_ids is not None:
            return (*input_ids.shape, input_ids.device)
        if self.pre_process:
            raise UserError("input_ids: None, but this pipeline stage has the embedding; pass token ids [b, s]")
        local_length, batch = self.received.shape[:2]
        return batch, local_length * self.layout.stream.size, self.received.device

    @property
    def received(self) -> Any:
        """Input of the last :meth:`set_input_tensor` call."""
        assert self._input_tensor is not None, "set_input_tensor comes before forward on later pipeline stages"
        return self._input_tensor

    # ---- construction

    @contextmanager
    def construction(
        self, *, embedding: bool | None = None, num_tokentypes: int = 0, tie_embedding: bool = False
    ) -> Iterator[None]:
        """Context in which a subclass builds its layers, on the model's device. Builds the embedding first
        (``embedding``; None: if :attr:`pre_process`). On exit, marks weights that two stages hold
        (:meth:`tie_over_stages`) and initializes all parameters unless ``config.perform_initialization`` is off."""
        config, settings = self.config, self.settings
        with torch.device(_construction_device(config)):
            if self.pre_process if embedding is None else embedding:
                self.embedding = LanguageModelEmbedding(
                    config,
                    self.vocab_size,
                    settings.max_sequence_length,
                    learned_positions=settings.position_embedding_type == "learned_absolute",
                    num_tokentypes=num_tokentypes,
                    divisible_by=settings.make_vocab_size_divisible_by,
                    groups=self.groups,
                )
            yield
        self.tie_over_stages(whole_embedding=tie_embedding)
        if config.perform_initialization:
            initialize_parameters(self, self.seed, self.groups)

    # ---- words

    @property
    def has_embedding(self) -> bool:
        """Whether this stage has the embedding: the first stage, and the last one if it keeps a copy."""
        return hasattr(self, "embedding")

    def build_output_layer(self, *, bias: bool = False) -> VocabParallelOutput:
        """Build and return the output layer, with the logits' soft cap. It borrows the embedding's weight if weights
        are shared and this stage has the embedding; a later stage with shared weights stores a copy that is tied to
        it."""
        config, tied = self.config, self.share_embeddings_and_output_weights
        layer = VocabParallelOutput(
            config.hidden_size,
            self.vocab_size,
            config=config,
            init_method=embedding_init(config) if tied or config.use_mup else weight_init(config),
            weight_is_shared=tied and self.has_embedding,
            tied_to="embedding.word_embeddings.weight" if tied else None,
            divisible_by=self.settings.make_vocab_size_divisible_by,
            groups=self.groups,
        )
        if bias:
            layer.add_bias(config, self.groups)
        layer.soft_cap = config.final_logit_softcapping
        if layer.weight is None:
            layer.borrowed = (self.embedding.word_embeddings.weight,)
        return layer

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return this stage's copy of the tied weight; None if the stage has neither embedding nor output layer."""
        if self.has_embedding:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def tie_over_stages(self, *, whole_embedding: bool) -> None:
        """Mark weights that the first and the last stage both hold, the shared output weight or, with
        ``whole_embedding``, all embedding weights: gradients are all-reduced as partial sums, and the last stage's
        copy is ``tied_to`` the first's name (saved under it, not counted). No effect if a stage has neither or both."""
        if self.pre_process == self.post_process:
            return
        weights: dict[str, Any] = {}
        if whole_embedding:
            weights = {f"embedding.{name}": weight for name, weight in self.embedding.named_parameters()}
        elif self.share_embeddings_and_output_weights:
            weights = {"embedding.word_embeddings.weight": self.shared_embedding_or_output_weight()}
        for name, weight in weights.items():
            spec: ParameterSpec = weight.spec
            grad, tied_to = {**spec.grad, "embedding": Partial()}, None if self.pre_process else name
            weight.spec = replace(spec, grad=grad, tied_to=tied_to)

    def outputs(self, hidden_states: Tensor, labels: Tensor | None) -> Tensor:
        """Return logits [b, s, v] of [s, b, h], with -inf for padded entries, or fp32 losses [b, s] of ``labels`` [b,
        s]. Divides by ``logits_scaling``, and by the width multiplier of muP. Without ``parallel_output``, all-gathers
        the logits over the tensor-parallel group; losses are complete on every rank."""
        weight = None  # its own, which the layer reads after FSDP has gathered it
        if self.output_layer.weight is None:
            weight = self.embedding.word_embeddings.weight
        divisor = self.config.logits_scaling / output_factor(self.config)
        if divisor != 1.0:  # scale the input: the chunked and fused losses accept no factor
            hidden_states = hidden_states / divisor
        if labels is not None:
            return self.output_layer(hidden_states, weight, labels.transpose(0, 1)).transpose(0, 1).contiguous()
        return self._visible_logits(self.output_layer(hidden_states, weight)).transpose(0, 1).contiguous()

    def _visible_logits(self, logits: Tensor) -> Tensor:
        """Set padded entries to -inf; all-gather over TP unless ``parallel_output``."""
        num_local = self.output_layer.num_local
        if num_local < logits.shape[-1]:
            padded = torch.arange(logits.shape[-1], device=logits.device) >= num_local
            logits = logits.masked_fill(padded, -torch.inf)
        return logits if self.parallel_output else gather_from_region(logits, self.groups.tp)

    # ---- positions

    def forward_context(
        self,
        input_ids: Tensor | None,
        sample_index: Tensor | None,
        documents: PackedSeqParams | TokenLayout | None = None,
        position_ids: Tensor | None = None,
        **more: Any,
    ) -> ForwardContext:
        """Build the layers' context for this rank's tokens [b, s]: rotary tables, documents and, in training only,
        dropout coordinates. ``more`` sets further fields of :class:`ForwardContext`.

        ``position_ids`` [1, s] means that one row packs several samples; ``sample_index`` [1, s] then has an entry per
        token. Otherwise each row is a sample, and ``sample_index`` is [b]. ``documents`` may be the micro-batch's
        layout, with its documents; else the context-parallel ranks of the program share it.

        Raises:
            ValueError: ``documents`` describe another number of tokens.
            UserError: packed samples with attention dropout in training, which identifies samples by row, unless
                ``documents.samples`` does."""
        batch, length, device = self.local_shape(input_ids)
        layout = self.micro_batch_layout(documents)
        if isinstance(documents, TokenLayout):
            documents = documents.documents
        full_length = layout.full_length(length)
        if documents is not None:
            documents = documents.documents(batch * full_length, layout.group.size)
            documents.check(batch, full_length)
        layout = layout.with_documents(documents)
        anonymous = documents is None or documents.samples is None
        if position_ids is not None and self.training and self.config.attention_dropout and anonymous:
            raise UserError("position_ids: samples that share a row train with attention_dropout 0")
        ropes = self.rotary_pos_emb, self.rotary_pos_emb_local
        if position_ids is None:
            rotary, rotary_local = (None if rope is None else rope(length, device, layout) for rope in ropes)
        else:
            rotary, rotary_local = (
                None if rope is None else rope.tables(position_ids[0], full_length) for rope in ropes
            )
        samples = self.samples(batch, sample_index, device) if self.training else None
        dropout = None if samples is None else self.dropout_coordinates(layout, length, samples, position_ids)
        return ForwardContext(
            layout=layout, rotary_pos_emb=rotary, rotary_pos_emb_local=rotary_local, dropout=dropout, **more
        )

    def micro_batch_layout(self, documents: PackedSeqParams | TokenLayout | None) -> TokenLayout:
        """Return the layout of a micro-batch: ``documents`` itself, the layout of ``local_cp_size`` ranks, or the
        program's layout. Raises UserError for a size without groups."""
        if isinstance(documents, TokenLayout):
            return documents
        if documents is None or (size := documents.local_cp_size) is None:
            return self.layout
        steps = parallel_state.get_step_groups()
        if size not in steps:
            raise UserError(
                f"packed_seq_params: local_cp_size {size}: no groups of this size, only of {sorted(steps)}; call "
                "initialize_model_parallel(hybrid_context_parallel=True), or use another size"
            )
        return TokenLayout.of_step(steps[size], self.layout.stream)

    def _default_positions(self, input_ids: Tensor, layout: TokenLayout) -> Tensor:
        """Return int64 positions [b, s] of full rows; raise UserError if the embedding has learned positions."""
        if self.pre_process and self.embedding.position_embeddings is not None:
            raise UserError("position_ids: None, but the model has learned positions; pass them, int64 [b, s]")
        return layout.positions(input_ids.shape[1], input_ids.device).expand(input_ids.shape)

    def dropout_coordinates(
        self, layout: TokenLayout, length: int, samples: Tensor, position_ids: Tensor | None = None
    ) -> DropoutCoordinates:
        """Return sample index and position of each token of this rank's part of the residual stream. Packed rows have
        one sample index per token, and ``position_ids`` [1, s] replaces the positions."""
        if samples.dim() > 1:  # one entry per token of the packed row
            samples = layout.stream_part(samples[0])
        positions = layout.positions(length, samples.device) if position_ids is None else position_ids[0]
        return DropoutCoordinates(self.dropout_stream, samples, layout.stream_part(positions))

    def samples(self, batch: int, sample_index: Tensor | None, device: torch.device) -> Tensor:
        """Return ``sample_index``. If None, number the samples consecutively over calls on this object: masks then
        differ between calls, but do not depend on the data's position in the run."""
        if sample_index is None:
            sample_index = torch.arange(batch, device=device) + self._forward_calls * batch
            self._forward_calls += 1
        return sample_index


def check_groups(pg_collection: Any, groups: ProcessGroups | None) -> None:
    """Check ``groups`` (None: ``parallel_state``'s) against a program's ``pg_collection`` of torch groups. Groups that
    it lacks are not checked. Raises UserError if a group has other ranks."""
    running = groups or parallel_state.get_process_groups()
    for name in ("tp", "pp", "cp"):
        group = getattr(pg_collection, name, None)
        if group is not None and tuple(dist.get_process_group_ranks(group)) != getattr(running, name).ranks:
            raise UserError(f"pg_collection.{name}: is not the group of the running program; leave pg_collection out")


def _construction_device(config: TransformerConfig) -> torch.device:
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


serve_other_names(__name__)
