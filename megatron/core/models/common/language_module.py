"""What language models have in common: the stage that a rank holds, word embeddings that are also the output layer,
positions, the coordinates of dropout, logits and losses.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import Llama3Scaling, RotaryEmbedding, latent_rotary, yarn_scaling
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.description.model import ModelDescription
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.common.description import Vocabulary
from megatron.core.models.common.language_model_embedding import LanguageModelEmbedding
from megatron.core.pipeline_parallel.stages import branches_of_layers, pipeline_stages
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.sharding.placement import ParameterSpec, Partial, initialize_parameters
from megatron.core.tensor_parallel.layers import VocabParallelOutput
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import embedding_init, weight_init
from megatron.core.transformer.module import MegatronModule

PositionEmbeddingType = Literal["learned_absolute", "rope", "yarn", "none"]


class LanguageModule(MegatronModule):
    """Base of the models of this package; they set ``parallel_output``, and ``output_layer`` on the
    stages that have it.

    Initial weights are functions of ``seed`` (``config.seed``) and their names; with ``config.perform_initialization``
    off, weights are zero and norms are the identity, for a checkpoint to fill. The model is built on
    ``config.use_cpu_initialization``'s device: the CPU, else the current GPU if there is one.
    """

    embedding: LanguageModelEmbedding
    output_layer: VocabParallelOutput
    parallel_output: bool

    def __init__(
        self,
        config: TransformerConfig,
        vocabulary: Vocabulary,
        positions: Positions,
        *,
        pre_process: bool,
        post_process: bool,
        seed: int | None,
        groups: ProcessGroups | None,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config)
        self.seed = config.seed if seed is None else seed
        self.groups = groups or parallel_state.get_process_groups()
        self.vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage
        self.pre_process, self.post_process = pre_process, post_process
        self.vocabulary, self.vocab_size = vocabulary, vocabulary.size
        self.share_embeddings_and_output_weights = vocabulary.shared
        self.positions = positions
        self.rotary_pos_emb, self.rotary_pos_emb_local = positions.rotary(config), positions.local_rotary(config)
        self.dropout_stream = DropoutStream(self.seed)
        self._stream_split = self.groups.stream(config.sequence_parallel)
        """Over which ranks the residual stream's positions are split."""
        self._input_tensor: Any = None
        self._forward_calls = 0

    # ---- stages

    def branches_of_this_stage(self, described: ModelDescription, layers: range | None = None) -> range:
        """Those of ``layers``, or what this pipeline rank and ``vp_stage`` hold.

        Raises:
            UserError: the configuration and the process groups disagree on the number of pipeline ranks.
        """
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

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the previous pipeline stage sent, hidden states [s, b, h], for the next ``forward``."""
        self._input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    @property
    def received(self) -> Any:
        """What :meth:`set_input_tensor` was given last."""
        assert self._input_tensor is not None, "set_input_tensor comes before forward on later pipeline stages"
        return self._input_tensor

    # ---- construction

    @contextmanager
    def construction(
        self, *, embedding: bool | None = None, num_tokentypes: int = 0, tie_embedding: bool = False
    ) -> Iterator[None]:  # fmt: skip
        """Where layers are built, behind the ``embedding`` (None: where :attr:`pre_process`): on the model's device.
        At the end weights that two stages hold are marked (:meth:`tie_over_stages`), and all get their values."""
        config, positions = self.config, self.positions
        with torch.device(_construction_device(config)):
            if self.pre_process if embedding is None else embedding:
                self.embedding = LanguageModelEmbedding(
                    config, self.vocab_size, positions.max_length, learned_positions=positions.are_learned,
                    num_tokentypes=num_tokentypes, divisible_by=self.vocabulary.divisible_by, groups=self.groups,
                )  # fmt: skip
            yield
            self.tie_over_stages(whole_embedding=tie_embedding)
            if config.perform_initialization:
                initialize_parameters(self, self.seed, self.groups)

    # ---- words

    @property
    def has_embedding(self) -> bool:
        """On the first stage, and wherever a model keeps a copy of it."""
        return hasattr(self, "embedding")

    def build_output_layer(self, *, bias: bool = False) -> VocabParallelOutput:
        """The output layer of the last stage, behind the embedding if that is here too."""
        config, tied = self.config, self.share_embeddings_and_output_weights
        layer = VocabParallelOutput(
            config.hidden_size, self.vocab_size, config=config,
            init_method=embedding_init(config) if tied else weight_init(config),
            weight_is_shared=tied and self.has_embedding,
            tied_to="embedding.word_embeddings.weight" if tied else None,
            divisible_by=self.vocabulary.divisible_by, groups=self.groups,
        )  # fmt: skip
        if bias:
            layer.add_bias(config, self.groups)
        layer.soft_cap = config.final_logit_softcapping
        if layer.weight is None:
            layer.borrowed = (self.embedding.word_embeddings.weight,)
        return layer

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The tied weight as this stage holds it; None where it holds none."""
        if self.has_embedding:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def tie_over_stages(self, *, whole_embedding: bool) -> None:
        """Marks weights that the first and the last stage each hold: their gradients are partial sums. Those are the
        shared output weight, or the ``whole_embedding`` of which the last stage has a copy."""
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
        """Logits [b, s, v] of [s, b, h], with -inf for padded entries, or the losses fp32 [b, s] of ``labels``."""
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

    # ---- positions

    def forward_context(
        self, input_ids: Tensor, sample_index: Tensor | None, documents: PackedSeqParams | None = None,
        position_ids: Tensor | None = None, **more: Any,
    ) -> ForwardContext:  # fmt: skip
        """What layers know of tokens [b, s] of this rank, and ``more`` fields.

        ``position_ids`` [1, s]: the one row is of several samples, and ``sample_index`` [1, s] says of which each token
        is; else samples are rows, of which ``sample_index`` has one entry each.

        Raises:
            ValueError: ``documents`` are of other tokens.
            UserError: a row of several samples, and dropout of attention weights, which knows rows alone.
        """
        (batch, length), device, cp = input_ids.shape, input_ids.device, self.groups.cp
        if documents is not None:
            documents.check(batch, length * cp.size)
        if position_ids is not None and self.training and self.config.attention_dropout:
            raise UserError("position_ids: samples that share a row train with attention_dropout 0")
        embeddings = self.rotary_pos_emb, self.rotary_pos_emb_local
        if position_ids is None:
            rotary, rotary_local = (None if each is None else each(length, device, cp) for each in embeddings)
        else:
            rotary, rotary_local = (None if each is None else each.tables(position_ids[0]) for each in embeddings)
        return ForwardContext(
            rotary_pos_emb=rotary, rotary_pos_emb_local=rotary_local, packed_seq_params=documents,
            dropout=self.dropout_coordinates(batch, length, sample_index, device, position_ids), **more,
        )  # fmt: skip

    def local_positions(self, length: int, device: torch.device) -> Tensor:
        """Positions in whole sequences, int64, of this context-parallel rank's ``length`` tokens."""
        cp = self.groups.cp
        return zigzag.positions(length * cp.size, cp.rank, cp.size, device)

    def dropout_coordinates(
        self, batch: int, length: int, sample_index: Tensor | None, device: torch.device,
        position_ids: Tensor | None = None,
    ) -> DropoutCoordinates | None:  # fmt: skip
        """None: nothing is dropped, as in evaluation."""
        if not self.training:
            return None
        stream = self._stream_split
        samples = self.samples(batch, sample_index, device)
        if samples.dim() > 1:  # of every token of a row
            samples = samples[0].chunk(stream.size)[stream.rank]
        positions = self.local_positions(length, device) if position_ids is None else position_ids[0]
        return DropoutCoordinates(self.dropout_stream, samples, positions.chunk(stream.size)[stream.rank])

    def samples(self, batch: int, sample_index: Tensor | None, device: torch.device) -> Tensor:
        """``sample_index``; without, successive calls count on: masks differ between calls, but are not tied to the
        data."""
        if sample_index is None:
            sample_index = torch.arange(batch, device=device) + self._forward_calls * batch
            self._forward_calls += 1
        return sample_index


def _construction_device(config: TransformerConfig) -> torch.device:
    """Where a model is built."""
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Positions:
    """How tokens know their position, in sequences of at most ``max_length``."""

    max_length: int
    kind: str = "learned_absolute"
    """A :data:`PositionEmbeddingType`."""
    percent: float = 1.0
    base: float = 10000
    interpolation: float | None = None
    llama3: Llama3Scaling | None = None

    @property
    def are_learned(self) -> bool:
        """Whether there is a vector for each of them."""
        return self.kind == "learned_absolute"

    def rotary(self, config: TransformerConfig) -> RotaryEmbedding | None:
        """The rotary embedding; None for kinds without one.

        Raises:
            UserError: there is no such kind.
        """
        if self.kind not in ("learned_absolute", "rope", "yarn", "none"):
            raise UserError(f"position_embedding_type {self.kind!r}: choose learned_absolute, rope, yarn or none")
        if config.multi_latent_attention:
            return latent_rotary(config, self.base, self.percent)
        if self.kind not in ("rope", "yarn"):
            return None
        return RotaryEmbedding(
            config.kv_channels, self.percent, rotary_base=self.base, interpolation=self.interpolation,
            dtype=config.params_dtype,
            scaling=yarn_scaling(config, self.max_length) if self.kind == "yarn" else self.llama3,
        )  # fmt: skip

    def local_rotary(self, config: TransformerConfig) -> RotaryEmbedding | None:
        """That of layers with a sliding window, where they have another base."""
        if self.kind not in ("rope", "yarn") or config.rotary_base_local is None or config.multi_latent_attention:
            return None
        return RotaryEmbedding(
            config.kv_channels, self.percent, rotary_base=config.rotary_base_local, dtype=config.params_dtype
        )
