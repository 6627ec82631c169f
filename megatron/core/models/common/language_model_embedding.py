"""Token embeddings plus optional learned absolute positions and token types.

Legend: s sequence, b batch, h hidden."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.random.dropout import DropoutCoordinates, dropout_is_fused, make_dropout
from megatron.core.sharding.placement import parameter
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.operators import scatter_to_sequence
from megatron.core.transformer.initial_values import embedding_init


class FullEmbedding(nn.Module):
    """Learned embedding of ``count`` positions or token types, replicated on every rank."""

    def __init__(self, config: TransformerConfig, count: int, groups: ProcessGroups) -> None:
        super().__init__()
        self.weight = parameter(
            (count, config.hidden_size), init=embedding_init(config), groups=groups, dtype=config.params_dtype
        )

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class LanguageModelEmbedding(nn.Module):
    """Embedding of int64 ids [b, s] as hidden states [s, b, h], scaled and with dropout. Under sequence parallelism
    each rank returns s / tp positions."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        *,
        learned_positions: bool,
        num_tokentypes: int = 0,
        divisible_by: int = 128,
        groups: ProcessGroups,
    ) -> None:
        """Build the word embedding, split over TP by vocabulary, and if needed replicated tables of learned positions
        and types. The scale is sqrt(h) with ``apply_embedding_scaling``, times ``embedding_multiplier``."""
        super().__init__()
        self.max_sequence_length, self.group = max_sequence_length, groups.tp
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=embedding_init(config),
            config=config,
            divisible_by=divisible_by,
            groups=groups,
        )
        self.borrowed = (self.word_embeddings.weight,)
        """Read by ``scattered``, which is not the module's ``forward``."""
        self.position_offset = config.learned_position_offset
        positions = max_sequence_length + self.position_offset
        self.position_embeddings = FullEmbedding(config, positions, groups) if learned_positions else None
        self.tokentype_embeddings = FullEmbedding(config, num_tokentypes, groups) if num_tokentypes else None
        self.embedding_dropout = make_dropout(config.hidden_dropout, "embedding", fused=dropout_is_fused(config))
        self.scale = 1.0
        if config.apply_embedding_scaling:  # rounded to params_dtype, as in the training of the published models
            self.scale = torch.tensor(config.hidden_size**0.5, dtype=config.params_dtype).item()
        self.scale *= config.embedding_multiplier * (config.mup_embedding_mult if config.use_mup else 1.0)
        self.sequence_parallel = groups.stream(config.sequence_parallel).size > 1

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        dropout: DropoutCoordinates | None = None,
        tokentype_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the embeddings [s, b, h] of ids int64 [b, s], plus position and token-type embeddings if the model has
        them, times the scale, after dropout. With sequence parallelism the result is this rank's part of s
        (reduce-scatter or split). AssertionError if a table's ids are None; ids without a table are ignored."""
        ids_sb = input_ids.t()  # transpose the ids: transposing the vectors would copy h times as much
        if self.position_embeddings is not None and self.position_offset:
            position_ids = position_ids + self.position_offset
        tables = [(self.position_embeddings, position_ids), (self.tokentype_embeddings, tokentype_ids)]
        added = [(table, ids) for table, ids in tables if table is not None]
        if self.sequence_parallel and not added:
            return self._dropped(self.word_embeddings.scattered(ids_sb), dropout)
        embeddings = self.word_embeddings(ids_sb)
        for table, ids in added:
            assert ids is not None, "a model with types of tokens is called with tokentype_ids"
            embeddings = embeddings + table(ids.t())
        if self.sequence_parallel:
            embeddings = scatter_to_sequence(embeddings, self.group)
        return self._dropped(embeddings, dropout)

    def _dropped(self, embeddings: Tensor, dropout: DropoutCoordinates | None) -> Tensor:
        return self.embedding_dropout(embeddings if self.scale == 1.0 else embeddings * self.scale, dropout)
