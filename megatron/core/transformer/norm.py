"""LayerNorm and RMSNorm over the last dim, optionally with zero-centered weights (w - 1 is stored).

  LayerNorm(x) = (x - mean) / sqrt(var + eps) * w + b      (Ba et al. 2016)
  RMSNorm(x) = x / sqrt(mean(x^2) + eps) * w               (Zhang and Sennrich 2019)

Statistics are fp32 for 16-bit inputs. Under sequence parallelism each rank normalizes its own positions, so that weight
gradients are partial sums over the tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.config.fp8 import notes_amax
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.extensions.apex import ApexNormalize
from megatron.core.fusions.dispatch import ByDevice
from megatron.core.fusions.fp8_cast import CastTarget
from megatron.core.fusions.residual_norm import Normalize, NormTraits, choose_normalize, normalize_triton
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.moved_parameters import MovableParameters
from megatron.core.sharding.placement import Ones, Shard, Zeros, parameter
from megatron.core.tensor_parallel import operators


class StreamNorm(MovableParameters):
    """Norm that can also add to the residual stream, which saves passes over memory.

    ``norm(x)`` returns the normalized x. ``norm(x, branch)`` returns (x + branch, normalized sum). ``norm(x, None)``
    returns (x, normalized x); its backward adds the stream's gradient to the norm's gradient in one kernel."""

    centred = False
    """Whether the mean is subtracted."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, groups: ProcessGroups, partial: tuple[str, ...]
    ) -> None:
        """Create the weight [hidden_size], ones (zeros with ``apply_layernorm_1p``), and select the kernel.
        ``partial``: mesh axes over which its gradient is a partial sum."""
        super().__init__()
        offset = float(config.apply_layernorm_1p)
        init = Zeros() if config.apply_layernorm_1p else Ones()
        self.weight = parameter((hidden_size,), init=init, partial=partial, groups=groups, dtype=config.params_dtype)
        self.bias: nn.Parameter | None = None
        self._traits = NormTraits(eps, self.centred, offset, notes_amax(config))
        self.normalize: Normalize = (
            ApexNormalize()
            if "norm" in config.apex_parts
            else choose_normalize(config.params_dtype, hidden_size, not config.no_persist_layer_norm)
        )

    @property
    def casts(self) -> bool:
        """Whether its kernel can write fp8 copies in place of values."""
        has_kernel = isinstance(self.normalize, ByDevice) and self.weight.element_size() == 2
        return has_kernel and type(self).forward is StreamNorm.forward

    def forward(self, x: Tensor, *branch: Tensor | None, target: CastTarget | None = None) -> Any:
        """Return the normalized ``x``; with a ``branch`` (or None) the pair (stream, normalized stream) of the class
        docstring. Normalized values have the weights' dtype, even for an fp32 residual stream with 16-bit weights. With
        a ``target`` (only if :attr:`casts`, on GPUs) they are a carrier of fp8 copies (``fp8_cast.carry``)."""
        inputs = x, branch[0] if branch else None, self.weight, self.bias, self._traits
        stream, normed = self.normalize(*inputs) if target is None else normalize_triton(*inputs, target)
        return (stream, normed) if branch else normed

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self._traits.eps}"


class LayerNorm(StreamNorm):
    centred = True

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, groups: ProcessGroups, partial: tuple[str, ...]
    ) -> None:
        super().__init__(config, hidden_size, eps, groups, partial)
        if not config.norm_bias:
            return
        self.bias = parameter((hidden_size,), init=Zeros(), partial=partial, groups=groups, dtype=config.params_dtype)


class RMSNorm(StreamNorm):
    @property
    def has_kernel(self) -> bool:
        """Whether this project's kernels may compute it."""
        return isinstance(self.normalize, ByDevice)

    @property
    def eps(self) -> float:
        return self._traits.eps

    @property
    def offset(self) -> float:
        """Constant added to the stored weight."""
        return self._traits.offset


class L2Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps), without weights (Llama 4's norm of queries and keys)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: object) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


class NormAcrossHeads(nn.Module):
    """RMSNorm over the channels of all heads of all tensor-parallel ranks (OLMo 2); all-reduces the squares in forward
    and their gradient in backward. [s, b, g, p, d] (g p local heads) -> same shape. Each rank holds the weights of its
    heads. Raises UserError: several ranks would share a head, whose squares would be counted more than once."""

    def __init__(self, config: TransformerConfig, num_heads: int, *, groups: ProcessGroups) -> None:
        """Create the weight of this rank's share of ``num_heads`` heads of ``config.kv_channels`` channels. Raises
        UserError if the tensor-parallel size does not divide ``num_heads``."""
        super().__init__()
        if num_heads % groups.tp.size:
            raise UserError(
                f"qk_layernorm_across_heads: {num_heads} key and value heads (num_query_groups) are fewer than "
                f"{groups.tp.size} tensor-parallel ranks: several ranks would share a head; take fewer ranks"
            )
        self.group, self.eps, self.width = groups.tp, config.norm_epsilon, num_heads * config.kv_channels
        self.offset, init = float(config.apply_layernorm_1p), Zeros() if config.apply_layernorm_1p else Ones()
        self.weight = parameter(
            (self.width,), init=init, mesh={"tp": Shard(0)}, groups=groups, dtype=config.params_dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        squares = wide.square().sum((2, 3, 4), keepdim=True)
        # all-reduce in forward and in backward: every rank's output depends on every rank's squares
        squares = operators.copy_to_region(operators.reduce_from_region(squares, self.group), self.group)
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return (normed * (self.weight + self.offset).view(x.shape[2:])).to(x.dtype)


def build_norm(
    config: TransformerConfig,
    hidden_size: int,
    eps: float,
    *,
    groups: ProcessGroups,
    partial: tuple[str, ...] | None = None,
) -> nn.Module:
    """Build the norm that ``config.normalization`` names (LayerNorm or RMSNorm; KeyError for others). ``partial``: mesh
    axes over which gradients are partial sums; None: ``tp`` under sequence parallelism, else none."""
    if partial is None:
        partial = ("tp",) if groups.stream(config.sequence_parallel).size > 1 else ()
    kinds: dict[str, type[StreamNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    return kinds[config.normalization](config, hidden_size, eps, groups, partial)


class ToDtype(nn.Module):
    """Identity norm that casts the residual stream to the compute dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class IdentityOp(nn.Module):
    """Identity module for an unused slot."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, *args: object) -> torch.Tensor:
        return x
