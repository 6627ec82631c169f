"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), as in Nemotron-H.

    z, x, B, C, dt = projections of u;  x, B, C through a causal convolution and SiLU
    S_t = exp(A dt) S_(t-1) + B (dt x)^T,   y = S_t^T C + D x,   A = -exp(A_log), dt = softplus(dt + dt_bias)
    out = W_out RMSNorm(y * silu(z)), normalized per group

One projection computes all five, interleaved per group: its rows are, group by group, the gates z and the channels x of
its heads, B, C, and dt of its heads. Splitting by groups keeps on one rank what belongs together.

Legend: s sequence, b batch, a groups (local), r heads per group, h = a r heads, k channels of B and C, v of a head, c
channels x, B, C of a group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Ones
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.ssm.description import describe_mamba, mamba_sizes
from megatron.core.transformer.ssm.gated_norm import GroupNorm
from megatron.core.transformer.ssm.mixer import DECAY_RATE, LAYOUTS, TIME_BIAS, MixerSubmodules, RecurrentMixer
from megatron.core.transformer.ssm.scans import follows, scan_heads
from megatron.core.transformer.ssm.state_space import state_space


class MambaMixer(RecurrentMixer):
    """Mamba-2 mixer, [s, b, hidden] -> [s, b, hidden] (s / tp positions under sequence parallelism)."""

    mixes_tokens, layouts = True, LAYOUTS
    calls = ("ssm", "mamba_norm_out")

    describe = staticmethod(describe_mamba)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int = 1,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build ``in_proj``, ``conv1d``, ``dt_bias``, ``A_log``, ``D``, ``norm`` and ``out_proj``. Raises UserError if
        the tensor-parallel size does not divide the groups of heads."""
        assert config.mamba_num_heads is not None, "follows from the hidden size in hybrid models"
        sizes, heads = mamba_sizes(config), config.mamba_num_heads
        super().__init__(config, submodules, layer_number, groups, sizes)
        inner, _, self.state, _, self.per_group = sizes.parts
        self.channels, self.rows = config.mamba_head_dim, (inner, inner + 2 * self.state, self.per_group)
        self.dt_bias, self.A_log = (self.vector(heads, init=init) for init in (TIME_BIAS, DECAY_RATE))
        self.D = self.vector(heads, init=Ones())
        self.norm = GroupNorm(sizes.outputs, inner, config, groups)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [s, b, hidden]; reads the layout of ``ctx``."""
        projected = self.in_proj(x)[0].unflatten(-1, (-1, sum(self.rows)))
        gate, mixed, step = projected.split(self.rows, dim=-1)
        mixed = self.at.ssm(self._mix, mixed, step.flatten(2), ctx)
        normed = self.at.mamba_norm_out(self.norm, mixed.flatten(2), gate)
        return self.out_proj(normed)[0]

    def _mix(self, mixed: Tensor, step: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the outputs [s, b, h, v] of the recurrence from x, B and C [s, b, a, c] before their convolution, and
        dt [s, b, h] before softplus."""
        length, batch = mixed.shape[:2]
        mask = follows(ctx, length, batch, mixed.device)
        convolved, sizes = self.conv1d(ctx.layout, self.layer_number, mixed, mask), (self.channels, *2 * (self.state,))
        inputs, key, query = (part.unflatten(-1, (-1, size)) for part, size in zip(convolved, sizes))
        wide = torch.promote_types(mixed.dtype, torch.float32)
        inputs = inputs.to(wide)
        step = F.softplus(step.to(wide) + self.dt_bias.to(wide))
        log_decay = -self.A_log.to(wide).exp() * step
        output = scan_heads(
            ctx.layout, self.layer_number, state_space, mask, query, key, step.unsqueeze(-1) * inputs, log_decay,
            by_heads=self.by_heads,
        )  # fmt: skip
        return (output + self.D.to(wide).unsqueeze(-1) * inputs).to(mixed.dtype)
