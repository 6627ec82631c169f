"""Gated delta net (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

    q, k, v, z, b, a = projections of x;  q, k, v through a causal convolution and SiLU;  q, k of length 1
    o = delta rule of q / sqrt(k), k, v, g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), or twice as much
    y = W_out (RMSNorm(o) * silu(z))

One projection computes all six, interleaved per key head: its rows are, key head by key head, one query, one key, the r
value heads of the key head, their r gates z, r numbers b and r numbers a. Splitting by key heads therefore keeps on one
rank what belongs together.

Legend: s sequence, b batch, a key heads (local), r value heads per key head, h = a r value heads, k channels of a key,
v of a value, c channels of a key head's query, key and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Ones
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.ssm.delta_rule import delta_rule
from megatron.core.transformer.ssm.description import describe_gated_delta_net
from megatron.core.transformer.ssm.gated_norm import GatedNorm, unit_length
from megatron.core.transformer.ssm.mixer import DECAY_RATE, LAYOUTS, MixerSizes, MixerSubmodules, RecurrentMixer
from megatron.core.transformer.ssm.scans import follows, scan_heads


class GatedDeltaNet(RecurrentMixer):
    """Linear attention by the gated delta rule, [s, b, hidden] -> [s, b, hidden] (s / tp positions under sequence
    parallelism)."""

    mixes_tokens, layouts = True, LAYOUTS
    calls = ("delta_rule", "gdn_norm_out")

    describe = staticmethod(describe_gated_delta_net)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int = 1,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build ``in_proj``, ``conv1d``, ``dt_bias``, ``A_log``, ``norm`` and ``out_proj``. Raises UserError if the
        tensor-parallel size does not divide the key heads."""
        heads, values = config.linear_num_key_heads, config.linear_num_value_heads
        key, value, per_key = config.linear_key_head_dim, config.linear_value_head_dim, values // heads
        parts = (key, key, per_key * value, per_key * value, per_key, per_key)
        sizes = MixerSizes(heads, parts, slice(3), config.linear_conv_kernel_dim, values * value)
        super().__init__(config, submodules, layer_number, groups, sizes)
        self.key, self.value, self.per_key, self.rows = key, value, per_key, (sum(parts[:3]), *parts[3:])
        self.max_beta = 1 + config.linear_allow_neg_eigval
        self.dt_bias, self.A_log = self.vector(values, init=Ones()), self.vector(values, init=DECAY_RATE)
        self.norm = GatedNorm(self.value, config, groups)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [s, b, hidden]; reads the layout of ``ctx``."""
        projected = self.in_proj(x)[0].unflatten(-1, (-1, sum(self.rows)))
        mixed, gate, beta, decay = projected.split(self.rows, dim=-1)
        mixed = self.at.delta_rule(self._mix, mixed, beta.flatten(2), decay.flatten(2), ctx)
        normed = self.at.gdn_norm_out(self.norm, mixed, gate)
        return self.out_proj(normed.flatten(2))[0]

    def _mix(self, mixed: Tensor, beta: Tensor, decay: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the outputs [s, b, h, v] of the delta rule from queries, keys and values [s, b, a, c] before their
        convolution, and the projections b and a [s, b, h]."""
        length, batch, heads = mixed.shape[:3]
        mask = follows(ctx, length, batch, mixed.device)
        convolved = self.conv1d(ctx.layout, self.layer_number, mixed.flatten(2), mask)
        query, key, value = convolved.unflatten(-1, (heads, -1)).split(
            (self.key, self.key, self.per_key * self.value), dim=-1
        )
        value = value.reshape(length, batch, -1, self.value)
        wide = torch.promote_types(value.dtype, torch.float32)
        log_decay = -self.A_log.to(wide).exp() * F.softplus(decay.to(wide) + self.dt_bias.to(wide))
        output = scan_heads(
            ctx.layout,
            self.layer_number,
            delta_rule,
            mask,
            unit_length(query, self.key**-0.5),
            unit_length(key),
            value,
            log_decay,
            self.max_beta * beta.to(wide).sigmoid(),
            by_heads=self.by_heads,
        )
        return output.to(mixed.dtype)
