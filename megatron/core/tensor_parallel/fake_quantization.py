"""Fake quantization: GEMMs in the model's dtype of weights and inputs that are rounded to fp8 (e4m3).

    q(x) = s e4m3(x / s)        Y = q(X) q(W)^T        dX = dY q(W)        dW = dY^T q(X)

Gradients ignore the rounding (straight-through estimator, Bengio et al. 2013). Scales are s = amax / 448, so that
nothing is clipped: one per weight of a layer (query, key and value, or gate and up, are one weight) or per expert, and
one per token of X. A weight or a token that ranks share has its amax over all of them: results do not depend on the
layout.

Legend: g experts of this rank, o output features, i input features."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.quantization import LINEAR
from megatron.core.fusions.e4m3 import rounded, scales
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.sharding.placement import ParameterSpec, Shard
from megatron.core.tensor_parallel.gemms import GemmLayer, GemmPlace, Gemms, Operand, Operands, install_gemms
from megatron.core.tensor_parallel.grouped_linear import GroupedLinear, GroupedProducts


def over_ranks(amax: Tensor, group: Group | None) -> Tensor:
    """Return ``amax`` >= 0 as fp32, raised to its maximum over ``group``; NaN is the largest. Collective."""
    amax = amax.float().contiguous()
    if group is not None and group.size > 1:
        # as integers: bits of non-negative numbers are ordered, and NaN is above infinity
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group.handle)
    return amax


class TokenRounding:
    """Rounds X [.., i] with one scale per token; ``group``: ranks that split its features."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return rounded(x, scales(over_ranks(x.detach().abs().amax(-1, keepdim=True), self.group)))


class WeightRounding:
    """Rounds the weights of a layer; ``group``: ranks that split them."""

    def __init__(self, layer: GemmLayer, group: Group | None) -> None:
        self.layer, self.group = layer, group
        self.scale: Tensor | None = None

    def refreshed(self, weight: Tensor) -> Tensor:
        """Return ``weight``, [o, i] or [g, o, i], rounded with a new scale of the layer's weights. Collective."""
        if weight.dim() == 3:
            amax = weight.detach().abs().amax((1, 2), keepdim=True)
        else:
            weights = (getattr(self.layer, name, None) for name in ("weight", "shared_weight"))
            amax = torch.stack([part.detach().abs().amax() for part in weights if part is not None]).amax().view(1)
        self.scale = scales(over_ranks(amax, self.group))
        return rounded(weight.detach(), self.scale)

    def with_last_scale(self, weight: Tensor) -> Tensor:
        """Return ``weight`` rounded with the scale of the last forward pass, which saw the same values: no collective,
        whose order in backward passes would be another."""
        assert self.scale is not None, "a backward pass follows a forward pass"
        return rounded(weight.detach(), self.scale)


class RoundedGemms(Gemms):
    """GEMMs of one layer with X rounded by ``inputs`` and, unless ``weights`` is None, rounded weights."""

    reads_weight = False

    def __init__(
        self, inputs: Callable[[Tensor], Tensor], weights: WeightRounding | None,
        accumulate: Callable[[Tensor, Tensor, Tensor], None],
    ) -> None:  # fmt: skip
        super().__init__(accumulate)
        self.inputs, self.weights = inputs, weights

    def pack_input(self, x: Tensor, *, for_backward: bool) -> Operands:
        values = self.inputs(x)
        return Operands(values, values)

    def output(self, x: Operand, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        return super().output(x, weight if self.weights is None else self.weights.refreshed(weight), bias, out=out)

    def input_gradient(self, grad: Operand, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        return super().input_gradient(
            grad, weight if self.weights is None else self.weights.with_last_scale(weight), out=out
        )


class RoundedProducts(GroupedProducts):
    """Grouped GEMMs of one layer of experts, as :class:`RoundedGemms`."""

    def __init__(
        self, inputs: Callable[[Tensor], Tensor], weights: WeightRounding | None, plain: GroupedProducts
    ) -> None:
        super().__init__(plain.multiply, plain._weight_gradient)
        self.inputs, self.weights = inputs, weights

    def pack_input(self, x: Tensor, ends: Tensor, *, for_backward: bool) -> Operands:
        values = self.inputs(x)
        return Operands(values, values)

    def output(self, x: Operand, weight: Tensor, ends: Tensor) -> Tensor:
        return super().output(x, weight if self.weights is None else self.weights.refreshed(weight), ends)

    def input_gradient(self, grad: Operand, weight: Tensor, ends: Tensor) -> Tensor:
        return super().input_gradient(
            grad, weight if self.weights is None else self.weights.with_last_scale(weight), ends
        )


def quantize_layers(model: nn.Module, groups: ProcessGroups) -> None:
    """Let the linear layers of a built chunk compute with rounded weights and inputs."""

    def recipe(place: GemmPlace) -> Gemms | GroupedProducts | None:
        layer = place.module
        before = layer.traits.gemms
        if not LINEAR.fullmatch(place.name) or type(before) is not Gemms:
            return None
        spec: ParameterSpec = layer.weight.spec  # type: ignore[union-attr, assignment]
        axis, group = ("etp", groups.etp) if isinstance(layer, GroupedLinear) else ("tp", groups.tp)
        splits_input = spec.mesh.get(axis) == Shard(len(spec.shape) - 1)
        inputs = TokenRounding(group if splits_input else None)
        weights = WeightRounding(layer, group if axis in spec.mesh else None)
        if isinstance(layer, GroupedLinear):
            return RoundedProducts(inputs, weights, layer.products)
        return RoundedGemms(inputs, weights, before.accumulate)

    install_gemms(model, recipe)
