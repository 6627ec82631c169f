"""Feed-forward networks: fc1, an activation, fc2.

    plain:  fc2(f(fc1(x)))                      fc1 is (ffn, h)
    gated:  fc2(f(gate(x)) * up(x))             fc1 stacks gate and up: (2 ffn, h), logically (2, ffn, h)

Legend: s sequence, b batch, h hidden, f feed-forward width of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.activations import activation_of, is_gated
from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.recompute import forget_activation
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


@dataclass
class MLPSubmodules:
    """Slots of :class:`MLP`."""

    linear_fc1: ModuleSpec | Callable[..., Any]
    linear_fc2: ModuleSpec | Callable[..., Any]


class MLP(nn.Module):
    """[s, b, h] -> [s, b, h]."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        groups: ProcessGroups | None = None,
        ffn_hidden_size: int | None = None,
    ) -> None:
        super().__init__()
        groups = groups or SINGLE_PROCESS
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        shared = {"config": config, "bias": config.add_bias_linear, "groups": groups}
        fc1_width = StackedSize((2, width), 1) if is_gated(config) else width
        self.linear_fc1 = build_module(
            submodules.linear_fc1, config.hidden_size, fc1_width, init_method=weight_init(config), **shared
        )
        self.activation = activation_of(config)
        self._saving = forget_activation(config)
        self.linear_fc2 = build_module(
            submodules.linear_fc2, width, config.hidden_size, init_method=output_weight_init(config), **shared
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        output, _ = self.project(self.linear_fc1(hidden_states)[0])
        return output

    def project(self, intermediate: Tensor, **how: bool) -> tuple[Any, Tensor | None]:
        """The activation and fc2 of what fc1 gave; ``how`` is handed on to fc2."""
        activated = self.activation(intermediate)
        with self._saving(activated, self.activation, intermediate):
            return self.linear_fc2(activated, **how)
