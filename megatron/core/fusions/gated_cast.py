"""Gated activations that write fp8 copies directly, for casts whose scale is known before (delayed scaling).

    y = a(min(gate, c)) (clip(up, -c, c) + o)        as in ``activation_kernels.py``

Forward writes the fp8 copy of y and its transpose. Backward writes both for the gradient of the packed input. The
linear layers around the activation read only these copies. Separate casts would write and read the values once more
(an 8B layer of 8,192 tokens: 1.4 of 3.5 GB). Values are rounded to the dtype of the input first, so that bytes equal
separate casts. The returned tensors carry copies and no values (``fp8_cast.carry``).

Legend: t tokens (all leading dims), f feed-forward width of this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.fusions.activation_kernels import GateTraits
from megatron.core.fusions.fp8_cast import CastTarget, Copies, Quantized, carry
from megatron.core.fusions.installed_triton import tl, triton

_TILE_T, _TILE_I, _NUM_WARPS = 64, 64, 8
"""Tile of a program, 16 elements per thread: backward has 96 registers then (sm_90), 142 with 32 elements."""

if triton is not None:
    from megatron.core.fusions.activation_kernels import gated_gradients, gated_value
    from megatron.core.fusions.fp8_cast import fp8_value, raise_amax

    @triton.jit
    def _store(value, factor, data, transposed, row, column, inside, height, width, COLUMNS: tl.constexpr):
        """Also the transpose with COLUMNS."""
        quantized = fp8_value(value, factor, data.dtype.element_ty)
        tl.store(data + row[:, None] * width + column[None, :], quantized, mask=inside)
        if COLUMNS:
            at = transposed + column.to(tl.int64)[:, None] * height + row[None, :]
            tl.store(at, tl.trans(quantized), mask=tl.trans(inside))

    @triton.jit
    def _forward(
        packed, factor, data, transposed, amax_bits, height, width, tiles_i, slope, clamp, offset,
        CLAMPS: tl.constexpr, COLUMNS: tl.constexpr, NOTED: tl.constexpr, TILE_T: tl.constexpr, TILE_I: tl.constexpr,
    ):  # fmt: skip
        """NOTED > 0 raises one of NOTED ``amax_bits`` to the largest magnitude."""
        row = (tl.program_id(0) // tiles_i).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
        column = (tl.program_id(0) % tiles_i) * TILE_I + tl.arange(0, TILE_I)
        inside = (row < height)[:, None] & (column < width)[None, :]
        gate_at = packed + row[:, None] * 2 * width + column[None, :]
        gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
        value = gated_value(gate, up, slope, clamp, offset, CLAMPS).to(packed.dtype.element_ty).to(tl.float32)
        _store(value, tl.load(factor), data, transposed, row, column, inside, height, width, COLUMNS)
        if NOTED:
            raise_amax(amax_bits, tl.where(inside, value, 0.0), NOTED)

    @triton.jit
    def _backward(
        packed, grad, factor, data, transposed, amax_bits, height, width, tiles_i, slope, clamp, offset,
        CLAMPS: tl.constexpr, COLUMNS: tl.constexpr, NOTED: tl.constexpr, TILE_T: tl.constexpr, TILE_I: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0) // tiles_i).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
        column = (tl.program_id(0) % tiles_i) * TILE_I + tl.arange(0, TILE_I)
        inside = (row < height)[:, None] & (column < width)[None, :]
        gate_at = packed + row[:, None] * 2 * width + column[None, :]
        gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        grad_gate, grad_up = gated_gradients(gate, up, upstream, slope, clamp, offset, CLAMPS)
        grad_gate = grad_gate.to(packed.dtype.element_ty).to(tl.float32)
        grad_up = grad_up.to(packed.dtype.element_ty).to(tl.float32)
        scale = tl.load(factor)
        _store(grad_gate, scale, data, transposed, row, column, inside, height, 2 * width, COLUMNS)
        _store(grad_up, scale, data, transposed, row, column + width, inside, height, 2 * width, COLUMNS)
        if NOTED:
            larger = tl.maximum(tl.abs(grad_gate), tl.abs(grad_up))
            larger = tl.where(grad_gate == grad_gate, larger, grad_gate)  # NaN, which tl.maximum may drop
            larger = tl.where(grad_up == grad_up, larger, grad_up)
            raise_amax(amax_bits, tl.where(inside, larger, 0.0), NOTED)


def _launch(
    kernel: Any, inputs: tuple[Tensor, ...], traits: GateTraits, target: CastTarget, shape: tuple[int, ...], *,
    columns: bool, observes: bool,
) -> Tensor:  # fmt: skip
    """``inputs`` are contiguous, first the packed [..., 2 f]. Return a carrier of ``shape``."""
    packed = inputs[0]
    height, width, out = packed.numel() // packed.shape[-1], packed.shape[-1] // 2, shape[-1]
    data = torch.empty((height, out), dtype=target.dtype, device=packed.device)
    transposed = torch.empty((out, height), dtype=target.dtype, device=packed.device) if columns else None
    amax, tiles_i = target.noted if observes else None, triton.cdiv(width, _TILE_I)
    if height:
        kernel[(triton.cdiv(height, _TILE_T) * tiles_i,)](
            *inputs, target.scale.factor, data, data if transposed is None else transposed,
            data if amax is None else amax, height, width, tiles_i, traits.slope, traits.clamp or 0.0, traits.offset,
            CLAMPS=traits.clamp is not None, COLUMNS=columns, NOTED=0 if amax is None else len(amax), TILE_T=_TILE_T,
            TILE_I=_TILE_I, num_warps=_NUM_WARPS,
        )  # fmt: skip
    inverse = target.scale.inverse
    copies = Copies(Quantized(data, inverse), None if transposed is None else Quantized(transposed, inverse))
    return carry(copies, shape, packed.dtype)


class _GatedCast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, traits: GateTraits, output: CastTarget, gradient: CastTarget, is_training: bool
    ) -> Tensor:
        """Return a carrier [..., f]. Saves contiguous ``x`` [..., 2 f]."""
        packed = x.contiguous()
        ctx.save_for_backward(packed)
        ctx.traits, ctx.gradient = traits, gradient
        shape = (*x.shape[:-1], x.shape[-1] // 2)
        return _launch(_forward, (packed,), traits, output, shape, columns=is_training, observes=is_training)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return a carrier of the gradient of x."""
        (packed,) = ctx.saved_tensors
        inputs, shape = (packed, grad.contiguous()), tuple(packed.shape)
        carrier = _launch(_backward, inputs, ctx.traits, ctx.gradient, shape, columns=True, observes=True)
        return carrier, None, None, None, None


def gated_cast_triton(x: Tensor, output: CastTarget, gradient: CastTarget, *, traits: GateTraits) -> Tensor:
    """Apply a gated activation, [..., 2 f] -> [..., f], and cast the result for ``output``, and in backward the
    gradient of ``x`` for ``gradient``. Both are carriers of fp8 copies: only the linear layers of the targets may read
    them. The activation needs no memory for values, only for ``x``."""
    return _GatedCast.apply(x, traits, output, gradient, torch.is_grad_enabled())
