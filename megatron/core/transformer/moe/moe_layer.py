"""Mixture of experts: each token passes through ``moe_router_topk`` of many feed-forward networks (Shazeer et al. 2017,
Lepikhin et al. 2020).

  y = sum over top-k experts e of  w_e * expert_e(x)  [+ shared_expert(x)]

The router selects experts and weights. The dispatcher sends each token's copies to the ranks of their experts, as rows
sorted by expert. The experts compute, and the dispatcher returns and sums the results.

Legend: s sequence (local), b batch, h hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.attention.cached_layout import CACHED
from megatron.core.attention.token_layout import ANY_ORDER
from megatron.core.config.errors import UserError
from megatron.core.config.moe import depends_on_micro_batch
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.transformer.context import NO_CONTEXT, ForwardContext
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.dispatch import build_dispatcher
from megatron.core.transformer.moe.experts import GroupedExperts, SequentialExperts
from megatron.core.transformer.moe.moe_description import describe_moe
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExperts
from megatron.core.transformer.overlap import Segments, drain, mixer_segments
from megatron.core.transformer.sites import Sited
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


@dataclass
class MoESubmodules:
    """Slots of :class:`MoELayer`."""

    shared_experts: MLPSubmodules
    """Slots of the shared expert, if the configuration has one."""
    router: ModuleSpec | Callable[..., Any] = TopKRouter
    experts: ModuleSpec | Callable[..., Any] | None = None
    """None: grouped GEMMs, or one expert at a time with ``moe_fusion=False``."""


class MoELayer(Sited, nn.Module):
    """MoE layer, [s, b, h] -> [s, b, h]; collective over the joint EP and ETP group, also in backward. Tensor
    parallelism requires sequence parallelism, so that each rank routes different tokens; UserError otherwise."""

    mixes_tokens, layouts = True, ANY_ORDER | CACHED  # the router's balance depends on all tokens of a sequence
    calls = ("moe", "shared_experts")

    def __init__(
        self, config: TransformerConfig, submodules: MoESubmodules, layer_number: int = 1, *, groups: ProcessGroups
    ) -> None:
        """Build the modules. ``submodules.experts`` None: grouped GEMMs, or one expert at a time without
        ``moe_fusion``. Raises UserError with tensor but without sequence parallelism."""
        super().__init__()
        self.open_sites()
        if groups.tp.size > 1 and not config.sequence_parallel:  # else every rank would route and count the same tokens
            raise UserError("num_moe_experts with tensor parallelism needs sequence_parallel")
        self.router = build_module(submodules.router, config, layer_number=layer_number, groups=groups)
        kind = GroupedExperts if config.moe_fusion else SequentialExperts
        self.experts = build_module(submodules.experts or kind, config, groups=groups)
        self.dispatcher = build_dispatcher(config, groups=groups)
        self.shared_experts: SharedExperts | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = SharedExperts(config, submodules.shared_experts, groups=groups)
        self._overlaps_shared = config.moe_shared_expert_overlap and self.shared_experts is not None
        self._tokens_stand_alone = not depends_on_micro_batch(config)

    describe = staticmethod(describe_moe)

    def forward(self, hidden_states: Tensor, ctx: ForwardContext = NO_CONTEXT) -> Tensor:
        """Route, dispatch, compute and combine, recomputed together with ``moe`` in ``recompute_modules``; add the
        shared experts' output, which has a separate policy."""
        output = self.at.moe(lambda x: drain(self._through_experts(x, ctx)), hidden_states)
        if self.shared_experts is None or self._overlaps_shared:
            return output
        return output + self.at.shared_experts(self.shared_experts, hidden_states)

    @property
    def overlaps(self) -> bool:
        """Whether the two halves of a micro-batch may be routed independently, with collectives in flight."""
        return self._tokens_stand_alone and (self.shared_experts is None or self.shared_experts.overlaps)

    def segments(self, hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
        """Run ``forward`` as a generator that yields where a collective may be in flight. Ignores MoE recomputation."""
        output = yield from self._through_experts(hidden_states, ctx)
        if self.shared_experts is None or self._overlaps_shared:
            return output
        return output + (yield from mixer_segments(self.shared_experts, hidden_states, ctx))

    def _through_experts(self, hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
        """Run three segments around dispatch and combine. With ``moe_shared_expert_overlap`` the shared expert runs
        during the dispatch and is added to the output [s, b, h]; else the caller adds it."""
        routing = self.router(hidden_states, ctx)
        dispatching = self.dispatcher.start_dispatch(hidden_states.flatten(0, 1), routing)
        # the shared expert overlaps with the dispatch, in backward too (autograd_handle.py)
        shared = self.at.shared_experts(self.shared_experts, hidden_states) if self._overlaps_shared else None
        yield
        dispatched = dispatching()
        rows = self.experts(dispatched.rows, dispatched.ends, dispatched.weights)
        combining = self.dispatcher.start_combine(rows, dispatched)
        yield
        output = combining().view_as(hidden_states)
        return output if shared is None else output + shared
