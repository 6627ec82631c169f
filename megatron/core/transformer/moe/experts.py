"""Experts of an MoE layer that this rank holds.

  y_r = p_r fc2(f(fc1(x_r)))        for each row r, a token's copy for one expert, with weight p_r

The weight multiplies the input of fc2: the result is the same, and fc2's output need not be saved for the weight's
gradient. Rows are sorted by expert. With expert tensor parallelism each rank computes a partial sum; the dispatcher
adds the partial sums (``dispatch.py``).

:class:`SequentialExperts`, the reference, computes one expert at a time; :class:`GroupedExperts` computes all in one
launch. Their parameters and names are the same, so checkpoints are interchangeable.

Legend: r rows, h hidden, f feed-forward width of this rank, e experts of this rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.activations import select_weighted_activation
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.tensor_parallel.batch_invariant import multiply_experts
from megatron.core.tensor_parallel.grouped_linear import GROUPED, LOOP, GroupedLinear, GroupedProducts
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.sites import Sited


class SequentialExperts(Sited, nn.Module):
    """Experts computed one at a time: rows [r, h], ends int32 [e], weights [r] -> [r, h]."""

    products = LOOP
    spans, results = ("expert_fc1", "moe_act"), ("moe_act",)

    def __init__(self, config: TransformerConfig, *, groups: ProcessGroups) -> None:
        """Build ``linear_fc1`` and ``linear_fc2`` of all local experts, of width ``moe_ffn_hidden_size`` per full
        expert (fc1 doubled for gated activations), with the GEMMs of ``products``."""
        super().__init__()
        self.open_sites()
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        assert width is not None and hidden is not None
        products = self.products
        if config.batch_invariant_mode:
            products = GroupedProducts(multiply_experts, products.weight_gradient)
        shared: dict[str, Any] = {"config": config, "products": products, "groups": groups}
        fc1_width = StackedSize((2, width), 1) if config.gated_linear_unit else width
        self.linear_fc1 = GroupedLinear(hidden, fc1_width, init_method=weight_init(config), **shared)
        self.linear_fc2 = GroupedLinear(
            width, hidden, init_method=output_weight_init(config), splits_input=True, **shared
        )
        self.activation = select_weighted_activation(config)

    def forward(self, rows: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        intermediate = self.at.expert_fc1(self.linear_fc1, rows, ends)
        activated = self.at.moe_act(self.activation, intermediate, weights)
        with self.kept.moe_act(activated, lambda x: self.activation(x, weights), intermediate):
            return self.linear_fc2(activated, ends, weights)


class GroupedExperts(SequentialExperts):
    """Experts computed by grouped GEMMs where supported: bf16 on GPUs with sizes that are multiples of 16 bytes."""

    products = GROUPED


serve_other_names(__name__)
