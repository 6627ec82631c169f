"""Rotary embedding of queries or keys: rotate pairs of channels by position-dependent angles.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)

Pairs are (i, i + d/2), or adjacent channels (2i, 2i + 1) if interleaved. The gradient is the rotation by the negative
angle, so that only the tables are saved for backward. Channels beyond the rotated width are copied.

Legend: s sequence, b batch, a heads, d head dim, r half of the rotated width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and second channels of all pairs."""
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: float) -> Tensor:
    """Rotate [s, b, a, d] by tables [s, 1, 1, r], times ``direction`` (1 or -1); channels from 2 r on are copied."""
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
    """Rotate a copy of ``x`` [s, b, a, d] by tables [s, 1, 1, r], r <= d / 2, which are cast to the dtype of ``x``; the
    first product is rounded to it, too."""
    return _Rotary.apply(x, cos.to(x.dtype), sin.to(x.dtype), interleaved)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate as :func:`apply_rotary`, in torch with autograd; tables are not cast: the result may be wider."""
    width = 2 * cos.shape[-1]
    x1, x2 = _pairs(x, width, interleaved)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    rotated = torch.stack((y1, y2), dim=-1).flatten(-2) if interleaved else torch.cat((y1, y2), dim=-1)
    return torch.cat((rotated, x[..., width:]), dim=-1)
