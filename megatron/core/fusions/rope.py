"""Applying a rotary embedding: pairs of channels are rotated by an angle that grows with the position.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)

The pairs are (i, i + d/2), or neighbours (2i, 2i + 1) when interleaved. The gradient is the rotation by the negative
angle, so that nothing but the tables is kept for backward. Channels beyond the rotated width pass through.

Legend: s sequence, b batch, a heads, d head dim, r half of the rotated width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and second channel of each pair."""
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: float) -> Tensor:
    width = 2 * cos.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x1, x2 = _pairs(x, width, interleaved)
    y1, y2 = _pairs(result, width, interleaved)
    torch.mul(x1, cos, out=y1)
    y1.addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=y2)
    y2.addcmul_(x1, sin, value=direction)
    if width < x.shape[-1]:
        result[..., width:] = x[..., width:]
    return result


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.interleaved, -1.0), None, None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate ``x`` [s, b, a, d] by tables [s, 1, 1, r] (r <= d / 2, any dtype: they are cast to that of ``x``)."""
    return _Rotary.apply(x, cos.to(x.dtype), sin.to(x.dtype), interleaved)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same in plain, differentiable torch."""
    width = 2 * cos.shape[-1]
    x1, x2 = _pairs(x, width, interleaved)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    rotated = torch.stack((y1, y2), dim=-1).flatten(-2) if interleaved else torch.cat((y1, y2), dim=-1)
    return torch.cat((rotated, x[..., width:]), dim=-1)
