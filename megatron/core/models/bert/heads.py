"""Heads of BERT after its last layer, except the output layer.

Legend: s sequence (this rank's positions), b batch, h hidden."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.operators import reduce_from_region
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.norm import build_norm


class BertLMHead(nn.Module):
    """Transform before the output layer, [s, b, h] -> [s, b, h]: dense, exact GELU, norm (Devlin et al. 2018)."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups) -> None:
        """Build ``dense`` [h, h], replicated, with a bias if linears have one, and ``layer_norm``."""
        super().__init__()
        width = config.hidden_size
        self.dense = ReplicatedLinear(
            width, width, config=config, init_method=weight_init(config), bias=config.add_bias_linear, groups=groups
        )
        self.layer_norm = build_norm(config, width, config.norm_epsilon, groups=groups)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.layer_norm(F.gelu(self.dense(hidden_states)[0]))


class Pooler(nn.Module):
    """Dense layer and tanh on the first position of each sequence: [s, b, h] -> [b, h]. With ``first_tokens`` int64
    [n], the samples are packed in one row and [s, 1, h] -> [n, h].

    Only one rank holds a sequence's first position. An all-reduce over the sequence-parallel ranks gives the vector to
    all of them. With context parallelism only the first rank's result is valid; ``first_tokens`` count the tokens of
    one context-parallel rank."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups) -> None:
        """Build ``dense`` [h, h] with a bias, replicated. ``forward`` reduces over the sequence-parallel ranks."""
        super().__init__()
        width = config.hidden_size
        self.dense = ReplicatedLinear(
            width, width, config=config, init_method=weight_init(config), whole_input=True, groups=groups
        )
        self.stream = groups.stream(config.sequence_parallel)

    def forward(self, hidden_states: Tensor, first_tokens: Tensor | None = None) -> Tensor:
        if first_tokens is None:
            first = hidden_states[0] * float(self.stream.is_first)  # other ranks hold later positions and add zero
        else:
            length = len(hidden_states)
            places = first_tokens - self.stream.rank * length
            is_local = (places >= 0) & (places < length)
            first = hidden_states[places.clamp(0, length - 1), 0] * is_local[:, None]
        return torch.tanh(self.dense(reduce_from_region(first, self.stream))[0])
