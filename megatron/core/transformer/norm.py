"""LayerNorm and RMSNorm over the last dim, optionally with weights stored minus one (zero-centred).

    LayerNorm(x) = (x - mean) / sqrt(var + eps) * w + b      (Ba et al. 2016)
    RMSNorm(x) = x / sqrt(mean(x^2) + eps) * w               (Zhang and Sennrich 2019)

Statistics are computed in fp32 for 16-bit inputs (torch's kernels do). Under sequence parallelism each rank normalizes
its own positions, so that weight gradients are partial sums over the tensor-parallel group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fusions.rms_norm import rms_norm
from megatron.core.placement import Ones, Zeros, parameter
from megatron.core.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.transformer.transformer_config import TransformerConfig


class _Norm(nn.Module):
    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, groups: ProcessGroups, partial: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps
        self.offset = float(config.apply_layernorm_1p)
        """Added to the stored weight."""
        init = Zeros() if config.apply_layernorm_1p else Ones()
        self.weight = parameter(self.shape, init=init, partial=partial, groups=groups, dtype=config.params_dtype)
        self.output_dtype = config.params_dtype

    def _whole_weight(self) -> Tensor:
        return self.weight + self.offset if self.offset else self.weight

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, eps={self.eps}"


class LayerNorm(_Norm):
    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, groups: ProcessGroups, partial: tuple[str, ...]
    ) -> None:
        super().__init__(config, hidden_size, eps, groups, partial)
        self.bias = parameter(self.shape, init=Zeros(), partial=partial, groups=groups, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight = self._whole_weight()
        if x.dtype == weight.dtype:
            return F.layer_norm(x, self.shape, weight, self.bias, self.eps)
        # an fp32 residual stream over 16-bit weights
        return F.layer_norm(x, self.shape, weight.to(x.dtype), self.bias.to(x.dtype), self.eps).to(self.output_dtype)


class RMSNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self._whole_weight()
        if x.dtype == weight.dtype:
            return rms_norm(x, weight, self.eps)
        return rms_norm(x, weight.to(x.dtype), self.eps).to(self.output_dtype)


class L2Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps), without weights (Llama 4's normalization of queries and keys)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


def make_norm(
    config: TransformerConfig,
    hidden_size: int,
    eps: float,
    *,
    groups: ProcessGroups | None = None,
    partial: tuple[str, ...] | None = None,
) -> nn.Module:
    """The norm that ``config.normalization`` names. ``partial`` overrides the axes of partial gradients."""
    groups = groups or SINGLE_PROCESS
    if partial is None:
        partial = ("tp",) if config.sequence_parallel and groups.tp.size > 1 else ()
    kinds: dict[str, type[_Norm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    return kinds[config.normalization](config, hidden_size, eps, groups, partial)


class IdentityOp(nn.Module):
    """Fills a slot that does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, *args: object) -> torch.Tensor:
        return x
