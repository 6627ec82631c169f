"""RMSNorm of an output and multiplication by SiLU or another function of a gate, in either order; vectors of length 1.

Legend: s sequence, b batch, h heads, v channels of a head, c channels (local).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.dispatch import kernels_serve
from megatron.core.fusions.gated_norm import GatedNormTraits, gated_norm
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Ones, Shard, parameter


def _has_kernel(x: Tensor, size: int) -> bool:
    return x.is_cuda and kernels_serve(x.dtype) and size <= 8192


def unit_length(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``x`` [s, b, h, c] divided by its length, with the constant of the published models, times ``scale``, in
    at least fp32; by a kernel in the dtype of ``x``."""
    width = x.shape[-1]
    if _has_kernel(x, width):  # a norm by the mean of the squares
        return gated_norm(x, None, None, GatedNormTraits(1e-6 / width, scale * width**-0.5))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6) * scale


class GatedNorm(nn.Module):
    """``RMSNorm(x) * weight * activation(gate)`` per head, in at least fp32. All heads have one weight [v], whose
    gradient is a partial sum over tensor-parallel ranks."""

    def __init__(
        self,
        width: int,
        config: TransformerConfig,
        groups: ProcessGroups,
        *,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.activation = activation
        partial = ("tp",) if groups.tp.size > 1 else ()
        self.eps = config.norm_epsilon if config.linear_norm_epsilon is None else config.linear_norm_epsilon
        self.weight = parameter((width,), init=Ones(), partial=partial, groups=groups, dtype=config.params_dtype)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return [s, b, h, v] of ``x`` and ``gate`` [s, b, h, v] or [s, b, a, h v / a], in the dtype of ``x``."""
        if _has_kernel(x, x.shape[-1]) and self.activation in (F.silu, torch.sigmoid):
            traits = GatedNormTraits(self.eps, sigmoid=self.activation is torch.sigmoid)
            return gated_norm(x, gate, self.weight, traits)
        wide, gate = x.to(torch.promote_types(x.dtype, torch.float32)), gate.reshape(x.shape)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(wide.dtype)
        return (normed * self.activation(gate.to(wide.dtype))).to(x.dtype)


class GroupNorm(nn.Module):
    """``RMSNorm(x * silu(gate)) * weight``, normalized per group of ``size`` channels, in at least fp32. The weight
    has ``width`` elements, which tensor-parallel ranks split."""

    def __init__(self, width: int, size: int, config: TransformerConfig, groups: ProcessGroups) -> None:
        super().__init__()
        self.eps, self.size = config.norm_epsilon, size
        self.weight = parameter((width,), init=Ones(), mesh={"tp": Shard(0)}, groups=groups, dtype=config.params_dtype)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return [s, b, c] of ``x`` [s, b, c] and ``gate`` [s, b, c] or [s, b, groups, size], in the dtype of ``x``."""
        if _has_kernel(x, self.size):
            parts = x.unflatten(-1, (-1, self.size)), gate.view(*x.shape[:2], -1, self.size)
            return gated_norm(*parts, self.weight, GatedNormTraits(self.eps, gate_first=True)).flatten(-2)
        gate = gate.reshape(x.shape)
        wide = torch.promote_types(x.dtype, torch.float32)
        grouped = (x.to(wide) * F.silu(gate.to(wide))).unflatten(-1, (-1, self.size))
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.to(wide)).to(x.dtype)
