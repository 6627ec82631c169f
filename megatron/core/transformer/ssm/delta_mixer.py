"""Linear attention by the delta rule: what the gated delta net and Kimi delta attention share.

    q, k, v through a causal convolution and SiLU;  q, k of length 1;  beta = sigmoid(b), or twice as much
    o = delta rule of q / sqrt(k), k, v, g = -exp(A_log) softplus(a + dt_bias), beta
    y = W_out (RMSNorm(o) * activation(z))

The projections q, k, v of a key head are interleaved: its query, its key, its r value heads, then rows of the subclass.

Legend: s sequence, b batch, a key heads (local), r value heads per key head, h = a r value heads, k channels of a key,
v of a value, c channels of a key head's query, key and values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.ssm.delta_rule import delta_rule
from megatron.core.transformer.ssm.description import MixerSizes
from megatron.core.transformer.ssm.gated_norm import GatedNorm, unit_length
from megatron.core.transformer.ssm.mixer import MixerSubmodules, RecurrentMixer
from megatron.core.transformer.ssm.scans import follows, scan_heads


class DeltaMixer(RecurrentMixer):
    """Base of linear attention by the delta rule. Subclasses create ``A_log`` [h] and ``dt_bias`` [h] or [h k], and
    call :meth:`attend`."""

    A_log: nn.Parameter
    dt_bias: nn.Parameter
    calls = ("delta_rule", "gdn_norm_out")

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int,
        groups: ProcessGroups,
        sizes: MixerSizes,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        """Build the projections and ``norm``. Raises UserError if the tensor-parallel size does not divide the key
        heads."""
        super().__init__(config, submodules, layer_number, groups, sizes)
        self.key, self.value = config.linear_key_head_dim, config.linear_value_head_dim
        self.rows, self.max_beta = (sum(sizes.parts[:3]), *sizes.parts[3:]), 1 + config.linear_allow_neg_eigval
        self.norm = GatedNorm(self.value, config, groups, activation=activation)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [s, b, a, c] before their convolution, and the further rows [s, b, a, .]."""
        return self.in_proj(x)[0].unflatten(-1, (-1, sum(self.rows))).split(self.rows, dim=-1)

    def attend(self, mixed: Tensor, gate: Tensor, beta: Tensor, decay: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [s, b, hidden] from :meth:`project`'s ``mixed``, gates [s, b, h, v] or [s, b, a, h v / a],
        b [s, b, h] and a [s, b, h] or [s, b, h, k]."""
        output = self.at.delta_rule(self._mix, mixed, beta, decay, ctx)
        normed = self.at.gdn_norm_out(self.norm, output, gate)
        return self.out_proj(normed.flatten(2))[0]

    def _mix(self, mixed: Tensor, beta: Tensor, decay: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the outputs [s, b, h, v] of the delta rule."""
        length, batch = mixed.shape[:2]
        mask = follows(ctx, length, batch, mixed.device)
        convolved, sizes = self.conv1d(ctx.layout, self.layer_number, mixed, mask), (self.key, self.key, self.value)
        query, key, value = (part.unflatten(-1, (-1, size)) for part, size in zip(convolved, sizes))
        wide = torch.promote_types(value.dtype, torch.float32)
        rate = self.A_log.to(wide).exp().view(-1, *[1] * (decay.ndim - 3))
        log_decay = -rate * F.softplus(decay.to(wide) + self.dt_bias.to(wide).view(decay.shape[2:]))
        beta = self.max_beta * beta.to(wide).sigmoid()
        inputs = unit_length(query, self.key**-0.5), unit_length(key), value, log_decay, beta
        output = scan_heads(ctx.layout, self.layer_number, delta_rule, mask, *inputs, by_heads=self.by_heads)
        return output.to(mixed.dtype)
