"""RMSNorm of an output and multiplication by SiLU or another function of a gate, in either order; vectors of length 1.

Legend: s sequence, b batch, h heads, v channels of a head, c channels (local).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.dispatch import kernels_serve
from megatron.core.fusions.gated_norm import GatedNormTraits, gated_norm
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Ones, Shard, parameter
from megatron.core.transformer.ssm.kernel_check import Problem, agree, is_right, random_values


def _has_kernel(x: Tensor, size: int, traits: GatedNormTraits, is_plain: bool = False) -> bool:
    """``is_plain``: neither gate nor weight."""
    fits = x.is_cuda and kernels_serve(x.dtype) and size <= 8192
    return fits and is_right(_check_kernel, x, size, traits, is_plain)


@cache
def _check_kernel(size: int, traits: GatedNormTraits, is_plain: bool, device: str) -> bool:
    shapes = {"inputs": (9, 2, 3, size), **({} if is_plain else {"gates": (9, 2, 3, size), "weights": (size,)})}

    def kernel(x: Tensor, gate: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        return gated_norm(x, gate, weight, traits)

    def formula(x: Tensor, gate: Tensor | float = 1.0, weight: Tensor | float = 1.0) -> Tensor:
        if isinstance(gate, Tensor):
            gate = gate.sigmoid() if traits.sigmoid else F.silu(gate)
        before, after = (gate, 1.0) if traits.gate_first else (1.0, gate)
        return traits.scale * F.rms_norm(x * before, (size,), eps=traits.eps) * weight * after

    inputs = dict(zip(shapes, random_values(*shapes.values())))
    return agree(Problem("norms of linear attention", inputs), kernel, formula, device)


def unit_length(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``x`` [s, b, h, c] divided by its length, with the constant of the published models, times ``scale``, in
    at least fp32; by a kernel in the dtype of ``x``."""
    width = x.shape[-1]
    traits = GatedNormTraits(1e-6 / width, scale * width**-0.5)  # a norm by the mean of the squares
    if _has_kernel(x, width, traits, True):
        return gated_norm(x, None, None, traits)
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
        traits = GatedNormTraits(self.eps, sigmoid=self.activation is torch.sigmoid)
        if self.activation in (F.silu, torch.sigmoid) and _has_kernel(x, x.shape[-1], traits):
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
        traits = GatedNormTraits(self.eps, gate_first=True)
        if _has_kernel(x, self.size, traits):
            parts = x.unflatten(-1, (-1, self.size)), gate.view(*x.shape[:2], -1, self.size)
            return gated_norm(*parts, self.weight, traits).flatten(-2)
        gate = gate.reshape(x.shape)
        wide = torch.promote_types(x.dtype, torch.float32)
        grouped = (x.to(wide) * F.silu(gate.to(wide))).unflatten(-1, (-1, self.size))
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.to(wide)).to(x.dtype)
