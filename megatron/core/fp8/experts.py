"""Experts in fp8: the grouped GEMMs of a layer, with one scale for the rows of all experts and one per expert's weight.

Casts work as in ``gemms.py``. Rows that expert-parallel ranks exchange have a common scale, the same on all of
these ranks, so that the fp8 values of a row do not depend on the rank of its expert. With delayed scaling experts
compute in the dtype of the weights until input and gradient have a scale: in the first step their magnitudes are known
only to the ranks of one expert-parallel group.

cuBLASLt computes one GEMM per expert. The host reads the number of rows per expert once per layer and forward pass:
wide experts compute for milliseconds, and narrow ones stay in bf16 (``config/fp8.py``).

Legend: g experts of this rank, r rows, o output features, i input features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.fp8.gemms import PerTensorGemms
from megatron.core.fp8.products import add_product, multiply
from megatron.core.fp8.scales import raise_over
from megatron.core.fusions.fp8_cast import (
    E4M3,
    Copies,
    Quantized,
    Scale,
    amax_parts,
    cast_groups,
    cast_tensor,
    columns_of_groups,
)
from megatron.core.tensor_parallel.gemms import Operand, Operands
from megatron.core.tensor_parallel.grouped_linear import GroupedProducts, row_ranges


class ExpertGemms(PerTensorGemms):
    """Casts of one layer of ``num_experts`` experts, whose parameter stacks their weights, [g * o, i]; a scale per
    expert. ``groups`` are all ranks that hold rows of the same dispatch, and ``weight_groups`` share each expert."""

    def __init__(self, *arguments: object, num_experts: int, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.num_experts = num_experts

    def matrices(self) -> list[Tensor]:
        (weight,) = self.weights
        return [*weight.detach().view(self.num_experts, -1, weight.shape[1])]

    def cast_weights(self, weights: Sequence[Tensor], *, rows: bool, columns: bool) -> list[Copies]:
        parts = raise_over(torch.cat([_amax(weight) for weight in weights]), self.weight_groups).split(1)
        return [cast_tensor(weight, E4M3, part, rows=rows, columns=columns) for weight, part in zip(weights, parts)]

    def row_scale(self, x: Tensor, ranges: list[slice], *, is_gradient: bool, observes: bool) -> Tensor | Scale | None:
        """Return the scale of ``x`` [r, ...], or the amaxes that determine it; None if delayed scales are not known
        yet. Collective without a history."""
        x = x if ranges[-1].stop == len(x) else x[: ranges[-1].stop]  # later rows are undefined
        history = self.history
        if history is None:
            return raise_over(_amax(x), self.groups)
        row = self._gradient if is_gradient else self._input
        if history.known[self._input] and history.known[self._gradient]:
            return history.scale(row, x.device)
        if observes:
            history.observe(row, amax_parts(x))
        return None

    def noted(self, scale: Tensor | Scale, *, is_gradient: bool) -> Tensor | None:
        """Return where a cast with ``scale`` (:meth:`row_scale`) records the magnitude; None: nowhere."""
        if self.history is None or not isinstance(scale, Scale):
            return None
        return self.history.noted(self._gradient if is_gradient else self._input, scale.factor.device)


def _amax(x: Tensor) -> Tensor:
    """fp32 [1], also where only some ranks have noted it."""
    return amax_parts(x).view(torch.int32).max().view(1).view(torch.float32)


class ExpertProducts(GroupedProducts):
    """Grouped GEMMs of one layer in fp8, by ``casts``; ``plain`` computes those in the dtype of the weights."""

    def __init__(self, plain: GroupedProducts, casts: ExpertGemms) -> None:
        super().__init__(plain.multiply, plain.weight_gradient)
        self.casts = casts

    def pack_input(self, x: Tensor, ends: Tensor, *, for_backward: bool) -> Operands:
        casts, ranges = self.casts, row_ranges(ends)
        scale = casts.row_scale(x, ranges, is_gradient=False, observes=for_backward)
        if scale is None:
            return Operands(x, x)
        columns = for_backward and casts.weight_gradients
        noted = casts.noted(scale, is_gradient=False) if for_backward else None
        copies = cast_groups(x, E4M3, scale, ranges, rows=True, columns=columns, noted=noted)
        assert copies.rows is not None
        second: Operand = copies.rows if copies.columns is None else copies.columns
        return Operands(copies.rows, second if casts.weight_gradients or not for_backward else x)

    def pack_gradient(self, grad: Tensor, ends: Tensor, *, for_input: bool, for_weight: bool) -> Operands:
        casts, ranges = self.casts, row_ranges(ends)
        scale = casts.row_scale(grad, ranges, is_gradient=True, observes=True)
        columns = for_weight and casts.weight_gradients
        if scale is None or not (for_input or columns):
            return Operands(grad, grad)
        noted = casts.noted(scale, is_gradient=True)
        copies = cast_groups(grad, casts.gradient_format, scale, ranges, rows=for_input, columns=columns, noted=noted)
        first: Operand = grad if copies.rows is None else copies.rows
        return Operands(first, grad if copies.columns is None else copies.columns)

    def output(self, x: Operand, weight: Tensor, ends: Tensor) -> Tensor:
        if isinstance(x, Tensor):
            return super().output(x, weight, ends)
        return self._multiply(x, weight, ends, columns=False)

    def input_gradient(self, grad: Operand, weight: Tensor, ends: Tensor) -> Tensor:
        if isinstance(grad, Tensor):
            return super().input_gradient(grad, weight, ends)
        return self._multiply(grad, weight, ends, columns=True)

    def _multiply(self, x: Quantized, weight: Tensor, ends: Tensor, *, columns: bool) -> Tensor:
        """``x`` [r, i] with weights [o, i] transposed, or with ``columns`` ``x`` [r, o] with the weights."""
        casts, ranges = self.casts, row_ranges(ends)
        copies = [
            casts.weight_copies(expert, columns=columns) for expert in weight
        ]  # of all experts: may be collective
        out = torch.empty(len(x.data), weight.shape[2 if columns else 1], dtype=casts.dtype, device=x.data.device)
        out[ranges[-1].stop :].zero_()
        for rows, copy in zip(ranges, copies):
            if rows.stop > rows.start:
                part = Quantized(x.data[rows], x.scale)
                multiply(part, copy, casts.dtype, fast=casts.fast_output and not columns, out=out[rows])
        return out

    def weight_gradient(self, grad: Operand, x: Operand, ends: Tensor, total: Tensor | None) -> Tensor:
        if isinstance(grad, Tensor) or isinstance(x, Tensor):
            return super().weight_gradient(grad, x, ends, total)
        ranges, adds = row_ranges(ends), total is not None
        grads, inputs = columns_of_groups(grad.data, ranges), columns_of_groups(x.data, ranges)
        if total is None:
            sizes = len(ranges), grad.data.shape[1], x.data.shape[1]
            total = torch.zeros(sizes, dtype=self.casts.dtype, device=grad.data.device)
        for total_oi, grad_or, x_ir in zip(total, grads, inputs):
            if not grad_or.numel():
                continue
            left, right = Quantized(grad_or, grad.scale), Quantized(x_ir, x.scale)
            if adds:
                add_product(total_oi, left, right)
            else:
                multiply(left, right, self.casts.dtype, fast=False, out=total_oi)
        return total
