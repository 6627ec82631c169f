"""The two GEMMs of an adapter next to the layer's GEMM, without a tensor of the layer's input or output size.

low = X A^T            dX += dlow A         added to the gradient that the layer's own GEMM computed
Y += low B^T           dlow = dY B          added to the output of the layer's own GEMM
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autograd_context import AutogradContext


class ProjectDown(torch.autograd.Function):
    """(x [..., i], A [r, i]) -> (x, x A^T [..., r]). The layer must be the only reader of the first result, and its
    backward must return a new tensor, because the adapter's part of dX is added in place."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Saves ``x`` and A."""
        ctx.save_for_backward(x, a)
        return x.view_as(x), torch.nn.functional.linear(x, a)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad_x: Tensor, grad_low: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, a = ctx.saved_tensors
        grad_rows = grad_low.flatten(0, -2)
        grad_x = grad_x.flatten(0, -2).addmm_(grad_rows, a).view(x.shape)
        return grad_x, grad_rows.t() @ x.flatten(0, -2)


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
