"""The two GEMMs of an adapter next to the layer's GEMM, without another tensor of the layer's input or output size.

low = X A^T            dX = dY W + dlow A
Y = X W^T + low B^T    dlow = dY B"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autograd_context import AutogradContext


class LowRankLinear(torch.autograd.Function):
    """(x [..., i], frozen W [o, i], bias [o] or None, A [r, i], B [o, r], scale) -> x W^T + scale (x A^T) B^T + bias.

    The products of rank r come first and the GEMM with W adds to them, so that it reads the larger tensor once while it
    computes; adding them to its result takes twice the memory traffic."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """Saves all tensors but ``bias``, and ``scale (x A^T)``."""
        rows = x.flatten(0, -2)
        low = scaled_product(rows, a.t(), scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        output = low @ b.t() if bias is None else torch.addmm(bias, low, b.t())
        return output.addmm_(rows, weight.t()).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, a, b, low = ctx.saved_tensors
        grad_rows, rows = grad.flatten(0, -2), x.flatten(0, -2)
        grad_low = scaled_product(grad_rows, b, ctx.scale)
        grad_x = (grad_low @ a).addmm_(grad_rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_low.t() @ rows, grad_rows.t() @ low, None


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return ``scale (left @ right)``, rounded once."""
    output = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(output, left, right, beta=0, alpha=scale, out=output)


class AddProjectedUp(torch.autograd.Function):
    """(output [..., o], low [..., r], B [o, r]) -> output + low B^T, in place."""

    @staticmethod
    def forward(ctx: AutogradContext, output: Tensor, low: Tensor, b: Tensor) -> Tensor:
        """Saves ``low`` and B."""
        ctx.save_for_backward(low, b)
        total = output.detach()  # not mark_dirty: the outputs of GEMMs with a bias are views
        total.view(-1, output.shape[-1]).addmm_(low.flatten(0, -2), b.t())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        low, b = ctx.saved_tensors
        return grad, grad @ b, grad.flatten(0, -2).t() @ low.flatten(0, -2)
