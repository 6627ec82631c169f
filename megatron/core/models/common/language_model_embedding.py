"""Token embeddings plus, where asked for, learned absolute positions and types of tokens.

Legend: s sequence, b batch, h hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.random.dropout import DropoutCoordinates, dropout_is_fused, make_dropout
from megatron.core.sharding.placement import parameter
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.initial_values import embedding_init


class WholeEmbedding(nn.Module):
    """A learned vector for each of ``count`` positions or types; every rank holds all of them."""

    def __init__(self, config: TransformerConfig, count: int, groups: ProcessGroups) -> None:
        super().__init__()
        self.weight = parameter(
            (count, config.hidden_size), init=embedding_init(config), groups=groups, dtype=config.params_dtype
        )

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class LanguageModelEmbedding(nn.Module):
    """input_ids, position_ids int64 [b, s] -> [s, b, h] (s / tp positions per rank under sequence parallelism)."""

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
        super().__init__()
        self.max_sequence_length, self.group = max_sequence_length, groups.tp
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, init_method=embedding_init(config), config=config,
            divisible_by=divisible_by, groups=groups,
        )  # fmt: skip
        self.position_embeddings = WholeEmbedding(config, max_sequence_length, groups) if learned_positions else None
        self.tokentype_embeddings = WholeEmbedding(config, num_tokentypes, groups) if num_tokentypes else None
        self.embedding_dropout = make_dropout(config.hidden_dropout, "embedding", fused=dropout_is_fused(config))
        self.scale = 1.0
        if config.apply_embedding_scaling:  # rounded as the published models were trained
            self.scale = torch.tensor(config.hidden_size**0.5, dtype=config.params_dtype).item()
        self.sequence_parallel = groups.stream(config.sequence_parallel).size > 1

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, dropout: DropoutCoordinates | None = None,
        tokentype_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        ids_sb = input_ids.t()  # of ids, not of vectors
        others = [(self.position_embeddings, position_ids), (self.tokentype_embeddings, tokentype_ids)]
        added = [(table, ids) for table, ids in others if table is not None]
        if self.sequence_parallel and not added:
            return self._dropped(self.word_embeddings.scattered(ids_sb), dropout)
        embeddings = self.word_embeddings(ids_sb)
        for table, ids in added:
            assert ids is not None, "a model with types of tokens is called with tokentype_ids"
            embeddings = embeddings + table(ids.t())
        if self.sequence_parallel:
            embeddings = scatter_to_sequence_parallel_region(embeddings, self.group)
        return self._dropped(embeddings, dropout)

    def _dropped(self, embeddings: Tensor, dropout: DropoutCoordinates | None) -> Tensor:
        """Scaled first, where that is asked for."""
        return self.embedding_dropout(embeddings if self.scale == 1.0 else embeddings * self.scale, dropout)
