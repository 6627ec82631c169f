"""Low-rank adapters of routed experts, one per expert and weight, as PEFT's ``target_parameters`` has them.

  Y[r] = X[r] W[g]^T + c (X[r] A[g]^T) B[g]^T                     for the rows r of expert g

A [g, r, i] and B [g, o, r] are split over ``ep`` like W; over ``etp`` A like the columns of W, and B like its rows.
Gate and up share A. PEFT has neither dropout nor DoRA for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Shard, Uniform, Zeros, parameter
from megatron.core.tensor_parallel.gemms import Product
from megatron.core.tensor_parallel.grouped_linear import GROUPED, GroupedLinear, grouped_linear


class ExpertAdapter(nn.Module):
    """Adapters of this rank's experts in ``linear``, with parameters ``lora_a`` and ``lora_b``."""

    is_active = True
    """False: only the product with the weight."""

    def __init__(self, linear: GroupedLinear, rank: int, scale: float, groups: ProcessGroups) -> None:
        super().__init__()
        self.scale, self.num_local, spec = scale, linear.num_local, linear.weight.spec  # type: ignore[attr-defined]
        experts, *rows, width = spec.shape
        splits_input = spec.mesh["etp"] == Shard(len(spec.shape) - 1)
        common: dict[str, Any] = {"groups": groups, "dtype": linear.weight.dtype, "ndim": 2}
        full: dict[str, Any] = {"mesh": {"ep": Shard(0)}, "partial": ("etp",), **common}
        split_a, split_b = {"mesh": {"ep": Shard(0), "etp": Shard(2)}, **common}, {"mesh": spec.mesh, **common}
        a_traits, b_traits = (split_a, full) if splits_input else (full, split_b)
        with torch.device(linear.weight.device):
            self.lora_a = parameter((experts, rank, width), init=Uniform(width**-0.5), **a_traits)
            self.lora_b = parameter((experts, *rows, rank), init=Zeros(), **b_traits)

    def forward(self, product: Product, x: Tensor, *rest: Any) -> Tensor:
        """Return the ``product`` [r, o] of ``x`` and ``rest`` (``grouped_linear``) plus the adapters' output; both are
        partial sums over ``etp`` if it splits the input."""
        if not self.is_active:
            return product(x, *rest)
        _, ends, traits, _, store = rest
        low = grouped_linear(x, self.lora_a, ends, traits, GROUPED, store) * self.scale
        added = grouped_linear(low, self.lora_b, ends, traits, GROUPED, store)
        return product(x, *rest) + added

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight with the adapters [g o, i]."""
        base, a, b = (x.view(self.num_local, -1, x.shape[-1]) for x in (weight, self.lora_a, self.lora_b))
        return merged_experts(base, a, b, self.scale).view(weight.shape)


def merged_experts(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``W + c B A`` for W [g, o, i], A [g, r, i] and B [g, o, r], computed in at least fp32, rounded once."""
    base, a, b = (tensor.to(torch.promote_types(weight.dtype, torch.float32)) for tensor in (weight, a, b))
    return torch.baddbmm(base, b, a, alpha=scale).to(weight.dtype)
