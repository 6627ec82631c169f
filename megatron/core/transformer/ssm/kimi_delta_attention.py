"""Kimi delta attention (Kimi Linear, arXiv 2510.26692): the gated delta rule with a decay per key channel.

    q, k, v, b = projections of x;  a = W_fb W_fa x;  z = W_gb W_ga x;  y as in ``delta_mixer.py``, with a sigmoid

One projection computes q, k, v and b, interleaved per head. a and z have rank v; tensor-parallel ranks replicate W_fa
and W_ga, and split W_fb and W_gb by heads. A_log is one number per head, dt_bias one per key channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import declare_row_parts
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.ssm.delta_mixer import DeltaMixer
from megatron.core.transformer.ssm.description import delta_sizes, describe_kimi_delta_attention
from megatron.core.transformer.ssm.mixer import DECAY_RATE, LAYOUTS, TIME_BIAS, MixerSubmodules, Slot


@dataclass
class KimiDeltaAttentionSubmodules(MixerSubmodules):
    """Slots of :class:`KimiDeltaAttention`: first and second matrix of the products of low rank."""

    down: Slot
    up: Slot


class KimiDeltaAttention(DeltaMixer):
    """Linear attention by the delta rule with a decay per channel; each key head has one value head."""

    mixes_tokens, layouts = True, LAYOUTS
    describe = staticmethod(describe_kimi_delta_attention)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: KimiDeltaAttentionSubmodules,
        layer_number: int = 1,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build ``in_proj``, ``conv1d``, ``out_proj``, ``norm``, ``f_a_proj``, ``g_a_proj``, ``f_b_proj``,
        ``g_b_proj``, ``dt_bias`` and ``A_log``. Raises UserError if the tensor-parallel size does not divide the heads.
        """
        super().__init__(config, submodules, layer_number, groups, delta_sizes(config, (1,)), torch.sigmoid)
        heads, key, value = config.linear_num_key_heads, self.key, self.value
        common = {"config": config, "init_method": weight_init(config), "bias": False, "groups": groups}
        self.f_a_proj, self.g_a_proj = (
            build_module(submodules.down, config.hidden_size, value, **common) for _ in range(2)
        )
        self.f_b_proj, self.g_b_proj = (
            build_module(submodules.up, value, StackedSize((heads, rows), 0), **common) for rows in (key, value)
        )
        for up, rows in ((self.f_b_proj, key), (self.g_b_proj, value)):
            declare_row_parts(up, (rows,), (rows,))
        self.dt_bias, self.A_log = self.vector(heads, key, init=TIME_BIAS), self.vector(heads, init=DECAY_RATE)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [s, b, hidden]; reads the layout of ``ctx``."""
        mixed, beta = self.project(x)
        decay = self.f_b_proj(self.f_a_proj(x)[0])[0].unflatten(-1, (-1, self.key))
        gate = self.g_b_proj(self.g_a_proj(x)[0])[0].unflatten(-1, (-1, self.value))
        return self.attend(mixed, gate, beta.flatten(2), decay, ctx)
