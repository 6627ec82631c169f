"""Linear layers of experts: consecutive ranges of rows, each with a separate weight.

  Y[r] = X[r] W[g]^T        dX[r] = dY[r] W[g]        dW[g] = dY[rows of g]^T X[rows of g]        for the rows r of g

``ends`` int32 [g], on the device, holds the end of each group's rows. Rows after the last end belong to no group: their
results are undefined, and they do not contribute to parameter gradients. Groups without rows have zero gradients.
Gradients are accumulated and announced as in ``linear.py``.

The GEMMs have two implementations: a loop over slices, for any dtype and device, which copies ``ends`` to the host; and
torch's grouped GEMM, for bf16 on GPUs, without a host sync (accumulating weight gradients: a custom kernel).

Legend: g groups (experts of this rank), r rows, o output features, i input features."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.extensions import quack
from megatron.core.fusions.dispatch import ByDevice
from megatron.core.fusions.embedding_gradient import choose_add_rows
from megatron.core.fusions.grouped_weight_gradient import add_grouped_weight_gradient
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.named_slices import SlicedState, name_slices
from megatron.core.sharding.placement import Init, Shard, XavierUniform, Zeros, parameter
from megatron.core.tensor_parallel import linear
from megatron.core.tensor_parallel.gemms import GemmLayer, Operand, Operands, accumulate_product, operand_of, tensors_of
from megatron.core.tensor_parallel.layers import StackedSize

if TYPE_CHECKING:
    from megatron.core.config.transformer_config import TransformerConfig

_ALIGNED = 16
"""Stride alignment in bytes that torch's grouped GEMM requires."""


class GroupedProducts:
    """The grouped GEMMs of a layer: operands (``gemms.py``), by default the tensors, and their products. ``multiply``:
    (x [r, i], weight [g, o, i], ends) -> [r, o]. ``weight_gradient``: (grad [r, o], x [r, i], ends, total [g, o, i] or
    None) -> ``total``, of any float dtype, with the gradient added in place; without it a new gradient in the dtype of
    ``grad``."""

    def __init__(
        self, multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
        weight_gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> None:  # fmt: skip
        self.multiply, self._weight_gradient = multiply, weight_gradient

    def pack_input(self, x: Tensor, ends: Tensor, *, for_backward: bool) -> Operands:
        """Return X [r, i] as operands; ``second`` is read only if ``for_backward``."""
        return Operands(x, x)

    def pack_gradient(self, grad: Tensor, ends: Tensor, *, for_input: bool, for_weight: bool) -> Operands:
        """Return dY [r, o] as operands. The flags say which of the two are read."""
        return Operands(grad, grad)

    def output(self, x: Operand, weight: Tensor, ends: Tensor) -> Tensor:
        """Return Y [r, o] for ``weight`` [g, o, i]; rows after the last end are undefined."""
        return self.multiply(_tensor(x), weight, ends)

    def input_gradient(self, grad: Operand, weight: Tensor, ends: Tensor) -> Tensor:
        """Return dX [r, i] for ``weight`` [g, o, i]; rows after the last end are undefined."""
        return self.multiply(_tensor(grad), weight.transpose(1, 2), ends)

    def weight_gradient(self, grad: Operand, x: Operand, ends: Tensor, total: Tensor | None) -> Tensor:
        """Add dW to ``total`` [g, o, i] in place and return it; None: return a new tensor."""
        return self._weight_gradient(_tensor(grad), _tensor(x), ends, total)


def _tensor(x: Operand) -> Tensor:
    assert isinstance(x, Tensor), "an operand of these products"
    return x


def row_ranges(ends: Tensor) -> list[slice]:
    """Return the row range of each group. Copies ``ends`` to the host, once per tensor, and notes the result there."""
    note = getattr(ends, "_row_ranges", None)
    if note is None:
        numbers = ends.tolist()
        note = ends._row_ranges = [slice(*bounds) for bounds in zip([0, *numbers], numbers)]  # type: ignore[attr-defined]
    return note


def multiply_loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [r, o] in the dtype of ``x`` [r, i], one GEMM per group with ``weight`` [g, o, i]; rows after the last end
    are zero. Reads ``ends`` on the host."""
    out = x.new_zeros((len(x), weight.shape[1]))
    for rows, weight_oi in zip(row_ranges(ends), weight):
        torch.mm(x[rows], weight_oi.t(), out=out[rows])
    return out


def weight_gradient_loop(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor | None = None) -> Tensor:
    """Return ``total`` [g, o, i] with the product of each group added in place, one GEMM per group; None: a new tensor
    in the dtype of ``x``. Reads ``ends`` on the host."""
    if total is None:
        total = x.new_zeros((len(ends), grad.shape[1], x.shape[1]))
    for rows, total_oi in zip(row_ranges(ends), total):
        accumulate_product(total_oi, grad[rows].t(), x[rows])
    return total


def multiply_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [r, o]: all groups in one launch, further rows undefined; falls back to :func:`multiply_loop`."""
    if not _is_served(x, weight.shape[1], x.shape[1]):
        return multiply_loop(x, weight, ends)
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)


def weight_gradient_grouped(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor | None = None) -> Tensor:
    """Compute dW [g, o, i] of all groups in one launch. Add it to ``total`` in place and return ``total``; None: return
    a new tensor in the dtype of ``grad``. A fp32 ``total`` uses the quack kernel if it supports the sizes. Falls back
    to :func:`weight_gradient_loop` unless the rows are bf16 with aligned widths."""
    if not _is_served(x, grad.shape[1], x.shape[1]):
        return weight_gradient_loop(grad, x, ends, total)
    if total is None:
        return torch._grouped_mm(grad.t(), x, offs=ends)
    if total.dtype == torch.float32 and quack.quack_serves(x, grad.shape[1], x.shape[1]):
        quack.add_grouped_weight_gradient(grad, x, ends, total)
    else:
        add_grouped_weight_gradient(grad, x, ends, total)
    return total


def _is_served(x: Tensor, *widths: int) -> bool:
    """torch's grouped GEMM requires bf16, aligned widths, at least one row."""
    aligned = all(width * x.element_size() % _ALIGNED == 0 for width in widths)
    return x.dtype == torch.bfloat16 and aligned and len(x) > 0


LOOP = GroupedProducts(multiply_loop, weight_gradient_loop)
GROUPED = GroupedProducts(
    ByDevice(multiply_grouped, multiply_loop), ByDevice(weight_gradient_grouped, weight_gradient_loop)
)


class GroupedLinear(SlicedState, GemmLayer):
    """Linear layer of this rank's experts, ``Y[r] = X[r] W[g]^T + b[g]``: [r, i] -> [r, o]; biases (zeros at first)
    with ``add_bias_linear``. The weight is logically (``config.num_moe_experts``, output size, input size); the
    parameter of a rank is 2-d, [g * o, i]. Experts are split over ``ep``, and the output size over ``etp``. With
    ``splits_input`` the input size is split instead: outputs are then partial sums over ``etp``, and only the first
    rank adds the bias, which all ``etp`` ranks hold."""

    def __init__(
        self,
        input_size: int,
        output_size: int | StackedSize,
        *,
        config: TransformerConfig,
        init_method: Init,
        splits_input: bool = False,
        products: GroupedProducts = LOOP,
        groups: ProcessGroups,
    ) -> None:
        super().__init__()
        assert config.num_moe_experts is not None, "these layers are of experts"
        size = output_size if isinstance(output_size, StackedSize) else StackedSize((output_size,), 0)
        shape, split = (config.num_moe_experts, *size.shape), 1 + size.split_dim
        common: dict[str, Any] = {"groups": groups, "dtype": config.params_dtype, "ndim": 2}
        mesh = {"ep": Shard(0), "etp": Shard(len(shape) if splits_input else split)}
        init = XavierUniform(stacked=1) if isinstance(init_method, XavierUniform) else init_method
        self.weight = parameter((*shape, input_size), init=init, mesh=mesh, **common)
        self.bias: nn.Parameter | None = None
        if config.add_bias_linear:
            where = {"ep": Shard(0)} if splits_input else mesh
            self.bias = parameter(shape, init=Zeros(), mesh=where, partial=("etp",) if splits_input else (), **common)
        self.products, self.num_local = products, config.num_moe_experts // groups.ep.size
        self.adds_bias = self.bias is not None and (groups.etp.is_first or not splits_input)
        self.traits = linear.LinearTraits(groups.etp, fuse_weight_gradient=config.gradient_accumulation_fusion)
        self.add_rows = choose_add_rows(config.params_dtype)
        self.product = grouped_linear

    def name_experts(self) -> None:
        """Name weights and biases per expert, ``weight0``, ``weight1``, …, as Transformer Engine does."""
        for stored in self._parameters.values():
            if stored is not None:
                name_slices(stored, self.num_local)

    def use_gemms(self, gemms: object) -> None:
        assert isinstance(gemms, GroupedProducts)
        self.products = gemms

    def forward(self, x: Tensor, ends: Tensor, bias_scale: Tensor | None = None) -> Tensor:
        """Return [r, o] for rows ``x`` [r, i]; ``ends`` int32 [g] holds the end row of each expert. ``bias_scale`` [r]
        multiplies the bias of each row; None: 1. No collective: with ``splits_input`` the results are partial sums over
        ``etp``, else dX is; the caller reduces both. Backward defers dW if ``weight_gradient_store`` is set."""
        traits = self.traits
        y = self.product(x, self.weight, ends, traits, self.products, self.weight_gradient_store)
        if not self.adds_bias:
            return y
        assert self.bias is not None
        scale = x.new_ones(len(x)) if bias_scale is None else bias_scale
        bias, bias_ready = linear.autograd_proxy(self.bias, x, traits)
        return _GroupedBias.apply(y, bias, scale, ends, traits, self.add_rows, bias_ready)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    traits: linear.LinearTraits,
    products: GroupedProducts,
    store: linear.WeightGradientStore | None,
) -> Tensor:
    """Return ``x`` [r, i] times ``weight`` [g * o, i] of each row's group transposed, [r, o], without collectives.
    Backward adds dW to ``main_grad`` or defers it to ``store``, as ``linear.parallel_linear``."""
    for_backward = torch.is_grad_enabled() and weight.requires_grad
    proxy: Any = linear.FusedGradParam(weight)
    ready = None
    if not linear.is_deferred(x, weight, traits, store):
        store = None
        proxy, ready = linear.autograd_proxy(weight, x, traits)
    return _GroupedLinear.apply(x, proxy, ends, traits, products, store, ready, for_backward)


def _by_group(x: Tensor, ends: Tensor) -> Tensor:
    return x.view(len(ends), -1, x.shape[-1])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, ends: Tensor, traits: linear.LinearTraits, products: GroupedProducts,
        store: linear.WeightGradientStore | None, ready: Tensor | None, for_backward: bool,
    ) -> Tensor:  # fmt: skip
        """[r, i] -> [r, o]. Saves the operand of X for dW, the weight and ``ends``."""
        ctx.adds_weight, weight = isinstance(weight, linear.FusedGradParam), linear.unwrap(weight)
        packed = products.pack_input(x, ends, for_backward=for_backward)
        # a frozen weight's input is read by no backward pass
        ctx.save_for_backward(weight, ends, *(tensors_of(packed.second) if for_backward else ()))
        # keep the parameter: recomputation returns saved tensors as copies without main_grad
        ctx.weight, ctx.traits, ctx.products, ctx.store = weight, traits, products, store
        return products.output(packed.first, _by_group(weight, ends), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """dW is None if it is added to ``main_grad`` or deferred to ``store``. The last result is a placeholder for the
        token ``ready``. No reduction of dX."""
        weight, ends, *saved = ctx.saved_tensors
        x: Any = operand_of(saved) if saved else None
        parameter, traits, products, store = ctx.weight, ctx.traits, ctx.products, ctx.store
        grad, grad_x, grad_weight = grad.contiguous(), None, None
        needs_input, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.adds_weight
        packed = products.pack_gradient(grad, ends, for_input=needs_input, for_weight=needs_weight)
        if needs_input:
            grad_x = products.input_gradient(packed.first, _by_group(weight, ends), ends)
        if store is not None:
            # capture no ctx: the closure outlives this pass, and ctx holds the graph with every activation
            second = packed.second
            store.put(lambda: _complete(parameter, second, x, ends, traits, products))
        elif needs_weight:
            grad_weight = _weight_gradient(parameter, packed.second, x, ends, traits, products)
        # token gradient last: its hooks start the reduction of a bucket, which must contain dW by then
        ready = linear.ready_gradient(grad) if ctx.needs_input_grad[6] else None
        return grad_x, grad_weight, None, None, None, None, ready, None


def _weight_gradient(
    weight: Tensor, grad: Operand, x: Operand, ends: Tensor, traits: linear.LinearTraits, products: GroupedProducts
) -> Tensor | None:
    main_grad = linear.fused_gradient(weight, traits)
    if main_grad is None:
        return products.weight_gradient(grad, x, ends, None).view(weight.shape)
    products.weight_gradient(grad, x, ends, _by_group(main_grad, ends))
    return None


@torch.no_grad()
def _complete(weight: Tensor, *rest: Any) -> None:
    """Compute a deferred weight gradient and run the parameter's hooks."""
    linear.complete_later(weight, _weight_gradient(weight, *rest))


class _GroupedBias(torch.autograd.Function):
    """Autograd function of y[r] + scale[r] b[g]."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Any, scale: Tensor, ends: Tensor, traits: linear.LinearTraits, add_rows: Any,
        ready: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Rounds to the dtype of ``y`` [r, o]; ``scale`` [r]."""
        ctx.adds_bias, bias = isinstance(bias, linear.FusedGradParam), linear.unwrap(bias)
        ctx.save_for_backward(bias, scale, ends)
        ctx.bias, ctx.traits, ctx.add_rows = bias, traits, add_rows
        return y + (scale.unsqueeze(-1) * _bias_rows(bias, ends, len(y))).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The bias gradient is None if it is added to ``main_grad``; dY times scale is rounded to the dtype of dY
        before its sum. The last result is a placeholder for the token ``ready``."""
        bias, scale, ends = ctx.saved_tensors
        grad_bias = grad_scale = None
        if ctx.needs_input_grad[2]:
            grad_scale = (grad * _bias_rows(bias, ends, len(grad))).sum(-1, dtype=scale.dtype)
        if ctx.needs_input_grad[1] or ctx.adds_bias:
            total = linear.fused_gradient(ctx.bias, ctx.traits) if ctx.adds_bias else None
            grad_bias = torch.zeros_like(bias) if total is None else total
            scaled = (grad * scale.unsqueeze(-1)).to(grad.dtype)
            ctx.add_rows(scaled, group_of_rows(ends, len(grad)), grad_bias.view(len(ends), -1))
            grad_bias = None if total is not None else grad_bias
        ready = linear.ready_gradient(grad) if ctx.needs_input_grad[6] else None
        return grad, grad_bias, grad_scale, None, None, None, ready


def group_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Return the group of each row, int64 [r]; -1 after the last end."""
    groups = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
    return groups.masked_fill(groups == len(ends), -1)


def _bias_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    return bias.view(len(ends), -1).index_select(0, group_of_rows(ends, rows).clamp(min=0))
