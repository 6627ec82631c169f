"""Shared expert of an MoE layer: a dense feed-forward network on every token, with an optional gate.

  y = mlp(x)        or        y = sigmoid(x g^T) mlp(x)        (Qwen2-MoE)

Legend: s sequence, b batch, h hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.batch_invariant_product import in_full_vectors
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import parameter
from megatron.core.tensor_parallel.batch_invariant import BatchInvariantGemms
from megatron.core.tensor_parallel.gemms import Gemms
from megatron.core.tensor_parallel.linear import LinearTraits, parallel_linear
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.overlap import Segments


class SharedExperts(MLP):
    """Shared expert, [s, b, h] -> [s, b, h]. Several shared experts are one network of their total width."""

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, *, groups: ProcessGroups) -> None:
        """Build one :class:`MLP` of width ``moe_shared_expert_intermediate_size`` and, with ``moe_shared_expert_gate``,
        ``gate_weight`` [1, h], replicated over TP."""
        super().__init__(config, submodules, groups=groups, ffn_hidden_size=config.moe_shared_expert_intermediate_size)
        self.gate_weight: nn.Parameter | None = None
        self._gate_traits = LinearTraits(groups.tp, fuse_weight_gradient=False)
        if config.batch_invariant_mode:
            self._gate_traits = self._gate_traits._replace(gemms=BatchInvariantGemms(Gemms(), groups.tp))
        if config.moe_shared_expert_gate:
            # partial sums: under sequence parallelism each rank sees its own positions only
            partial = ("tp",) if groups.stream(config.sequence_parallel).size > 1 else ()
            self.gate_weight = parameter(
                (1, config.hidden_size), init=weight_init(config), partial=partial, groups=groups,
                dtype=config.params_dtype,
            )  # fmt: skip

    def segments(self, hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
        output = yield from super().segments(hidden_states, ctx)
        if self.gate_weight is None:
            return output
        gate = parallel_linear(hidden_states, self.gate_weight, None, self._gate_traits)
        return output * in_full_vectors(torch.sigmoid, gate)


serve_other_names(__name__)
