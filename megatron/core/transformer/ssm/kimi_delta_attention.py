"""Kimi delta attention (Kimi Linear, arXiv 2510.26692): the gated delta rule with a decay per key channel.

    q, k, v, b = projections of x;  q, k, v through a causal convolution and SiLU;  q, k of length 1
    o = delta rule of q / sqrt(k), k, v, g = -exp(A_log) softplus(W_fb W_fa x + dt_bias), beta = sigmoid(b)
    y = W_out (RMSNorm(o) * sigmoid(W_gb W_ga x))

One projection computes q, k, v and b, interleaved per head. Decays g and gates have rank v; tensor-parallel ranks
replicate W_fa and W_ga, and split W_fb and W_gb by heads. A_log is one number per head, dt_bias one per key channel.

Legend: s sequence, b batch, h heads (local), k channels of a key, v of a value, c channels of a query, key and value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import declare_row_parts
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.ssm.delta_rule import delta_rule
from megatron.core.transformer.ssm.description import describe_kimi_delta_attention
from megatron.core.transformer.ssm.gated_norm import GatedNorm, unit_length
from megatron.core.transformer.ssm.mixer import (
    DECAY_RATE,
    LAYOUTS,
    TIME_BIAS,
    MixerSizes,
    MixerSubmodules,
    RecurrentMixer,
    Slot,
)
from megatron.core.transformer.ssm.scans import follows, scan_heads


@dataclass
class KimiDeltaAttentionSubmodules(MixerSubmodules):
    """Slots of :class:`KimiDeltaAttention`: first and second matrix of the products of low rank."""

    down: Slot
    up: Slot


class KimiDeltaAttention(RecurrentMixer):
    """Linear attention by the delta rule with a decay per channel."""

    mixes_tokens, layouts = True, LAYOUTS
    calls = ("delta_rule", "gdn_norm_out")

    describe = staticmethod(describe_kimi_delta_attention)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: KimiDeltaAttentionSubmodules,
        layer_number: int = 1,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build the projections of :class:`RecurrentMixer`, ``f_a_proj``, ``f_b_proj``, ``g_a_proj``, ``g_b_proj``,
        ``dt_bias``, ``A_log`` and ``norm``. Raises UserError if the tensor-parallel size does not divide the heads."""
        heads, key, value = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
        sizes = MixerSizes(heads, (key, key, value, 1), slice(3), config.linear_conv_kernel_dim, heads * value)
        super().__init__(config, submodules, layer_number, groups, sizes)
        self.key, self.value, self.max_beta = key, value, 1 + config.linear_allow_neg_eigval
        common = {"config": config, "init_method": weight_init(config), "bias": False, "groups": groups}
        self.f_a_proj, self.g_a_proj = (
            build_module(submodules.down, config.hidden_size, value, **common) for _ in range(2)
        )
        self.f_b_proj, self.g_b_proj = (
            build_module(submodules.up, value, StackedSize((heads, rows), 0), **common) for rows in (key, value)
        )
        for up, rows in ((self.f_b_proj, key), (self.g_b_proj, value)):
            declare_row_parts(up, (rows,), (rows,))
        self.dt_bias = self.vector(heads, key, init=TIME_BIAS)
        self.A_log = self.vector(heads, init=DECAY_RATE)
        self.norm = GatedNorm(value, config, groups, activation=torch.sigmoid)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [s, b, hidden]; reads the layout of ``ctx``."""
        projected = self.in_proj(x)[0].unflatten(-1, (-1, 2 * self.key + self.value + 1))
        mixed, beta = projected.split((2 * self.key + self.value, 1), dim=-1)
        decay, gate = self.f_b_proj(self.f_a_proj(x)[0])[0], self.g_b_proj(self.g_a_proj(x)[0])[0]
        mixed = self.at.delta_rule(self._mix, mixed, beta.flatten(2), decay, ctx)
        normed = self.at.gdn_norm_out(self.norm, mixed, gate.view(mixed.shape))
        return self.out_proj(normed.flatten(2))[0]

    def _mix(self, mixed: Tensor, beta: Tensor, decay: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the outputs [s, b, h, v] of the delta rule from queries, keys and values [s, b, h, c] before their
        convolution, the projection b [s, b, h] and the decays' projection [s, b, h k]."""
        length, batch, heads = mixed.shape[:3]
        mask = follows(ctx, length, batch, mixed.device)
        convolved = self.conv1d(ctx.layout, self.layer_number, mixed.flatten(2), mask)
        parts = convolved.unflatten(-1, (heads, -1)).split((self.key, self.key, self.value), dim=-1)
        wide = torch.promote_types(mixed.dtype, torch.float32)
        query, key = unit_length(parts[0], self.key**-0.5), unit_length(parts[1])
        steps = F.softplus(decay.to(wide) + self.dt_bias.to(wide)).unflatten(-1, (heads, -1))
        inputs = query, key, parts[2], -self.A_log.to(wide).exp().unsqueeze(-1) * steps
        output = scan_heads(
            ctx.layout,
            self.layer_number,
            delta_rule,
            mask,
            *inputs,
            self.max_beta * beta.to(wide).sigmoid(),
            by_heads=self.by_heads,
        )
        return output.to(mixed.dtype)
