"""What BERT has behind its last layer, beside the output layer.

Legend: s sequence (this rank's positions), b batch, h hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.norm import make_norm


class BertLMHead(nn.Module):
    """[s, b, h] -> [s, b, h] before the output layer: dense, exact GELU, norm (Devlin et al. 2018)."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups) -> None:
        super().__init__()
        width = config.hidden_size
        self.dense = ReplicatedLinear(
            width, width, config=config, init_method=weight_init(config), bias=config.add_bias_linear, groups=groups
        )
        self.layer_norm = make_norm(config, width, config.norm_epsilon, groups=groups)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.layer_norm(F.gelu(self.dense(hidden_states)[0]))


class Pooler(nn.Module):
    """[s, b, h] -> [b, h]: tanh of a dense layer of each sequence's first position; or of a row [s, 1, h] of samples
    -> [n, h], that of each of the ``first_tokens``, int64 [n].

    That position is on one of the ranks that split a sequence. Tensor-parallel ranks all get its vector; of
    context-parallel ranks only the first has it, what others return means nothing. But
    ``first_tokens`` are those of one context-parallel rank, counted in its tokens.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups) -> None:
        super().__init__()
        width = config.hidden_size
        self.dense = ReplicatedLinear(
            width, width, config=config, init_method=weight_init(config), whole_input=True, groups=groups
        )
        self.stream = groups.stream(config.sequence_parallel)

    def forward(self, hidden_states: Tensor, first_tokens: Tensor | None = None) -> Tensor:
        if first_tokens is None:
            first = hidden_states[0] * float(self.stream.is_first)  # the others hold later positions
        else:
            length = len(hidden_states)
            places = first_tokens - self.stream.rank * length
            here = (places >= 0) & (places < length)
            first = hidden_states[places.clamp(0, length - 1), 0] * here[:, None]
        return torch.tanh(self.dense(reduce_from_tensor_model_parallel_region(first, self.stream))[0])
