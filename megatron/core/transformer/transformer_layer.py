"""One transformer layer: attention and feed-forward network, each with its norm, dropout and residual.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))

Under ``apply_residual_connection_post_layernorm`` what is added to is norm(x) instead of x.

Legend: s sequence, b batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.transformer.attention import RotaryTables
from megatron.core.transformer.dropout import DropoutCoordinates, make_dropout
from megatron.core.transformer.recompute import forget_norms, run_of
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class TransformerLayerSubmodules:
    """Slots of :class:`TransformerLayer`."""

    input_layernorm: ModuleSpec | Callable[..., Any]
    self_attention: ModuleSpec | Callable[..., Any]
    pre_mlp_layernorm: ModuleSpec | Callable[..., Any]
    mlp: ModuleSpec | Callable[..., Any]


def _stream_itself(stream: Tensor, normed: Tensor) -> Tensor:
    return stream


def _normed_stream(stream: Tensor, normed: Tensor) -> Tensor:
    return normed


class TransformerLayer(nn.Module):
    """[s, b, h] -> [s, b, h]. ``layer_number`` counts from 1 over the whole model."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        groups: ProcessGroups | None = None,
    ) -> None:
        super().__init__()
        groups = groups or SINGLE_PROCESS
        self.config, self.layer_number = config, layer_number
        norm_arguments = (config, config.hidden_size, config.norm_epsilon)
        self.input_layernorm = build_module(submodules.input_layernorm, *norm_arguments, groups=groups)
        self.self_attention = build_module(
            submodules.self_attention, config, layer_number=layer_number, groups=groups
        )
        self.attention_dropout = make_dropout(config.hidden_dropout, "layer", layer_number, "attention output")
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, *norm_arguments, groups=groups)
        self.mlp = build_module(submodules.mlp, config, groups=groups)
        self.mlp_dropout = make_dropout(config.hidden_dropout, "layer", layer_number, "mlp output")
        self._run_mlp, self._saving = run_of(config, "mlp"), forget_norms(config)
        self._residual = _stream_itself
        if config.apply_residual_connection_post_layernorm:
            self._residual = _normed_stream

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: RotaryTables | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout: DropoutCoordinates | None = None,
    ) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        with self._saving(normed, self.input_layernorm, hidden_states):
            branch = self.self_attention(normed, attention_mask, rotary_pos_emb, packed_seq_params, dropout)
        hidden_states = self._residual(hidden_states, normed) + self.attention_dropout(branch, dropout)
        normed = self.pre_mlp_layernorm(hidden_states)
        with self._saving(normed, self.pre_mlp_layernorm, hidden_states):
            branch = self._run_mlp(self.mlp, normed)
        return self._residual(hidden_states, normed) + self.mlp_dropout(branch, dropout)
