"""Gated delta net (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next, Qwen3.5 and OLMo-Hybrid.

    q, k, v, z, b, a = projections of x;  y as in ``delta_mixer.py``, with activation SiLU

One projection computes all six, interleaved per key head: its rows are, key head by key head, one query, one key, the r
value heads of the key head, their r gates z, r numbers b and r numbers a. Splitting by key heads therefore keeps on one
rank what belongs together.
"""

from __future__ import annotations

from torch import Tensor

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Ones
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.ssm.delta_mixer import DeltaMixer
from megatron.core.transformer.ssm.description import delta_sizes, describe_gated_delta_net, gated_delta_net_rows
from megatron.core.transformer.ssm.mixer import DECAY_RATE, LAYOUTS, MixerSubmodules


class GatedDeltaNet(DeltaMixer):
    """Linear attention by the gated delta rule, [s, b, hidden] -> [s, b, hidden] (s / tp positions under sequence
    parallelism)."""

    mixes_tokens, layouts = True, LAYOUTS
    describe = staticmethod(describe_gated_delta_net)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int = 1,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build ``in_proj``, ``conv1d``, ``out_proj``, ``norm``, ``dt_bias`` and ``A_log``. Raises UserError if the
        tensor-parallel size does not divide the key heads."""
        values, sizes = config.linear_num_value_heads, delta_sizes(config, gated_delta_net_rows(config))
        super().__init__(config, submodules, layer_number, groups, sizes)
        self.dt_bias, self.A_log = self.vector(values, init=Ones()), self.vector(values, init=DECAY_RATE)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [s, b, hidden]; reads the layout of ``ctx``."""
        mixed, gate, beta, decay = self.project(x)
        return self.attend(mixed, gate, beta.flatten(2), decay.flatten(2), ctx)
