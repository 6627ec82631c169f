"""Feed-forward networks: fc1, an activation, fc2.

  plain:  fc2(f(fc1(x)))                      fc1 is (ffn, h)
  gated:  fc2(f(gate(x)) * up(x))             fc1 stacks gate and up: (2 ffn, h), logically (2, ffn, h)

Legend: s sequence, b batch, h hidden, f feed-forward width of this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.activations import select_activation
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.mlp_description import describe_mlp
from megatron.core.transformer.overlap import Segmented, Segments, can_overlap, enter, finish, leave
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


@dataclass
class MLPSubmodules:
    """Slots of :class:`MLP`."""

    linear_fc1: ModuleSpec | Callable[..., Any]
    linear_fc2: ModuleSpec | Callable[..., Any]


class MLP(Segmented):
    """Feed-forward network, [s, b, h] -> [s, b, h] (s / tp local positions under sequence parallelism)."""

    mixes_tokens = False
    spans, results = ("_activation",), ("mlp_act",)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        groups: ProcessGroups,
        ffn_hidden_size: int | None = None,
    ) -> None:
        """Build the modules from the slots. ``ffn_hidden_size``: of the full layer; None: ``config``'s."""
        super().__init__()
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        shared = {"config": config, "bias": config.add_bias_linear, "groups": groups}
        fc1_width = StackedSize((2, width), 1) if config.gated_linear_unit else width
        self.linear_fc1 = build_module(
            submodules.linear_fc1, config.hidden_size, fc1_width, init_method=weight_init(config), **shared
        )
        self.activation = select_activation(config)
        self.linear_fc2 = build_module(
            submodules.linear_fc2, width, config.hidden_size, init_method=output_weight_init(config), **shared
        )

    describe = staticmethod(describe_mlp)

    @property
    def first_linear(self) -> nn.Module:
        """First linear layer of the mixer, the only reader of its input."""
        return self.linear_fc1

    @property
    def overlaps(self) -> bool:
        """Whether its collectives can stay in flight."""
        return can_overlap(self.linear_fc1, self.linear_fc2)

    def segments(self, hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
        """Run four segments: (start the all-gather) | fc1 | activation and fc2 (start the reduction) | (wait, add the
        bias). Collectives are in flight between segments only with ``ctx.overlap``."""
        gathering = enter(self.linear_fc1, hidden_states, ctx)
        yield
        intermediate, _ = self.linear_fc1(gathering)
        yield
        activated = self.at._activation(self.activation, intermediate)
        with self.kept.mlp_act(activated, self.activation, intermediate):
            summing = leave(self.linear_fc2, activated, ctx)
        yield
        return finish(self.linear_fc2, summing, ctx)


serve_other_names(__name__)
