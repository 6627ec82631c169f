"""RMSNorm on CPUs with a hand-written gradient in few passes over memory.

    y = x r w,  r = 1 / sqrt(mean(x^2) + eps)
    dx = r (g w - x r^2 mean(g w x)),  dw = sum_t g x r

Torch has a fused kernel on GPUs; on CPUs its composite needs about twice the number of passes, with casts for 16 bits.

Legend: t tokens (all leading dims), h normalized dim."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return torch's RMSNorm over the last dim."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Saves x, weight, and the inverse root mean square [..., 1]."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        norm_t1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        rstd_t1 = norm_t1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd_t1)
        return (x * rstd_t1).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Reductions are fp32 (fp64 for fp64); the product of ``grad`` and weight is rounded to their dtype first."""
        x, weight, rstd_t1 = ctx.saved_tensors
        normed = x * rstd_t1
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean_t1 = torch.matmul(product, weight.to(product.dtype)).unsqueeze(-1).div_(x.shape[-1])
        grad_x = (grad * weight).sub(normed.mul_(mean_t1)).mul_(rstd_t1)
        return grad_x.to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize ``x`` [..., h] with statistics in fp32 (fp64 for fp64), in the dtype of ``x``; ``weight`` [h] has the
    same float dtype. On GPUs torch's kernel, on CPUs the gradient above."""
    return rms_norm_reference(x, weight, eps) if x.is_cuda else _RMSNorm.apply(x, weight, eps)
