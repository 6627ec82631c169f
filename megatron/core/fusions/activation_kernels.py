"""Triton kernels of activations for which torch has no one-pass kernel: gated ones and squared ReLU.

    gated         y = a(min(gate, c)) (clip(up, -c, c) + o)   of packed [..., 2 f], gate before up, read in place
                  dgate = dy (up + o) a'(gate),  dup = dy a(gate),  zero where the clamp is active
    squared_relu  y = max(x, 0)^2,  dx = 2 dy max(x, 0)

a is silu, x sigmoid(x), or quick_gelu, x sigmoid(1.702 x). Gated kernels can also multiply each token by a weight p in
the same pass (MoE): y = p y0, dp = sum_f dy y0. Only the input is saved for backward. Arithmetic is fp32; the result is
rounded once. GELU is not included: torch's kernels already need one pass per direction, and its bias is part of the
preceding GEMM.

Legend: t tokens (all leading dims), f feed-forward width of this rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.fp8_cast import new_amax, note_amax
from megatron.core.fusions.installed_triton import tl, triton

_BLOCK, _NUM_WARPS = 2048, 4
"""Elements per program: 4 KiB of 16-bit values of each tensor, two 16-byte vectors per thread. Gated kernels take the
next power of 2 for narrower rows: threads beyond the width hold no loads in flight (65536 rows of width 768 on an H200:
forward 76 and backward 137 us, with 2048 elements 118 and 208)."""


def _gated_block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


class GateTraits(NamedTuple):
    """Parameters of a gated activation."""

    slope: float
    """Slope of the sigmoid: 1 for silu, 1.702 for quick_gelu."""
    clamp: float | None = None
    offset: float = 0.0
    notes_amax: bool = False
    """Whether kernels note the largest magnitudes of the output and the input gradient, for casts to fp8."""


if triton is not None:
    from megatron.core.fusions.fp8_cast import magnitude_bits

    @triton.jit
    def gated_value(gate, up, slope, clamp, offset, CLAMPS: tl.constexpr):
        """Return a(gate) (up + offset), fp32; CLAMPS bounds gate and up by ``clamp`` first."""
        if CLAMPS:
            gate = tl.minimum(gate, clamp)
            up = tl.minimum(tl.maximum(up, -clamp), clamp)
        return gate * tl.sigmoid(slope * gate) * (up + offset)

    @triton.jit
    def gated_gradients(gate, up, upstream, slope, clamp, offset, CLAMPS: tl.constexpr):
        """Return the gradients of gate and up, fp32; zero for clamped elements."""
        if CLAMPS:
            gate_moves = gate <= clamp
            up_moves = (up >= -clamp) & (up <= clamp)
            gate = tl.minimum(gate, clamp)
            up = tl.minimum(tl.maximum(up, -clamp), clamp)
        sigmoid = tl.sigmoid(slope * gate)
        grad_up = upstream * gate * sigmoid
        grad_gate = upstream * (up + offset) * sigmoid * (1.0 + slope * gate * (1.0 - sigmoid))
        if CLAMPS:
            grad_gate = tl.where(gate_moves, grad_gate, 0.0)
            grad_up = tl.where(up_moves, grad_up, 0.0)
        return grad_gate, grad_up

    @triton.jit
    def _gated_forward(
        packed, weights, out, amax_bits, width, tiles, slope, clamp, offset, CLAMPS: tl.constexpr,
        WEIGHTED: tl.constexpr, NOTED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Write BLOCK columns of one row of the gated activation, a(gate) (up + offset), to ``out`` [rows, width]; one
        program per row and column block. CLAMPS bounds gate and up by ``clamp`` first; WEIGHTED multiplies by the row's
        weight. fp32 arithmetic, rounded once. NOTED > 0 raises one of NOTED ``amax_bits`` to the largest magnitude."""
        row = (tl.program_id(0) // tiles).to(tl.int64)
        column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(packed + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(packed + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        result = gated_value(gate, up, slope, clamp, offset, CLAMPS)
        if WEIGHTED:
            result *= tl.load(weights + row).to(tl.float32)
        rounded = result.to(out.dtype.element_ty)
        tl.store(out + row * width + column, rounded, mask=inside)
        if NOTED:
            most = tl.max(magnitude_bits(tl.where(inside, rounded.to(tl.float32), 0.0)), axis=0)
            tl.atomic_max(amax_bits + tl.program_id(0) % NOTED, most)

    @triton.jit
    def _gated_backward(
        grad, packed, weights, grad_weights, grad_packed, amax_bits, width, tiles, slope, clamp, offset,
        CLAMPS: tl.constexpr, WEIGHTED: tl.constexpr, NOTED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Write BLOCK columns of both halves of one row of ``grad_packed`` [rows, 2 width]; recomputes the activation
        from ``packed``. With WEIGHTED also write this program's partial sum of the weight's gradient, fp32, to its
        entry of ``grad_weights`` [rows, tiles]. Clamped elements get zero. NOTED as in forward."""
        row = (tl.program_id(0) // tiles).to(tl.int64)
        column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        gate_at = row * 2 * width + column
        gate = tl.load(packed + gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(packed + gate_at + width, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            product = tl.where(inside, upstream * gated_value(gate, up, slope, clamp, offset, CLAMPS), 0.0)
            tl.store(grad_weights + tl.program_id(0), tl.sum(product, axis=0))
            upstream *= tl.load(weights + row).to(tl.float32)
        grad_gate, grad_up = gated_gradients(gate, up, upstream, slope, clamp, offset, CLAMPS)
        rounded_gate, rounded_up = grad_gate.to(grad_packed.dtype.element_ty), grad_up.to(grad_packed.dtype.element_ty)
        tl.store(grad_packed + gate_at, rounded_gate, mask=inside)
        tl.store(grad_packed + gate_at + width, rounded_up, mask=inside)
        if NOTED:
            bits = tl.maximum(magnitude_bits(rounded_gate.to(tl.float32)), magnitude_bits(rounded_up.to(tl.float32)))
            tl.atomic_max(amax_bits + tl.program_id(0) % NOTED, tl.max(tl.where(inside, bits, 0), axis=0))

    @triton.jit
    def _squared_relu_forward(x, out, size, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.maximum(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32), 0.0)
        tl.store(out + at, (value * value).to(out.dtype.element_ty), mask=at < size)

    @triton.jit
    def _squared_relu_backward(grad, x, grad_x, size, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.maximum(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32), 0.0)
        upstream = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(grad_x + at, (2.0 * upstream * value).to(grad_x.dtype.element_ty), mask=at < size)


def _gated_launch(kernel: Any, tensors: tuple[Tensor | None, ...], packed: Tensor, traits: GateTraits) -> None:
    """One program per row and block of columns. The last but one of ``tensors`` is the weights (forward) or their
    gradient buffer (backward), the last the output, whose largest magnitude is noted if ``traits`` say so."""
    width, weighted, out = packed.shape[-1] // 2, tensors[-2] is not None, tensors[-1]
    block = _gated_block(width)
    tiles = triton.cdiv(width, block)
    amax = new_amax(packed.device) if traits.notes_amax else None
    # an absent tensor is passed as another pointer, which the kernel does not read without WEIGHTED
    if packed.numel():
        kernel[(packed.numel() // (2 * width) * tiles,)](
            *(packed if x is None else x for x in tensors), packed if amax is None else amax, width, tiles,
            traits.slope, traits.clamp or 0.0, traits.offset, CLAMPS=traits.clamp is not None, WEIGHTED=weighted,
            NOTED=0 if amax is None else len(amax), BLOCK=block, num_warps=_NUM_WARPS,
        )  # fmt: skip
    if amax is not None and out is not None:
        note_amax(out, amax)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, traits: GateTraits, weights: Tensor | None) -> Tensor:
        """Saves contiguous ``x`` and the weights."""
        packed, weights = x.contiguous(), None if weights is None else weights.contiguous()
        ctx.save_for_backward(packed, weights)
        ctx.traits = traits
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        _gated_launch(_gated_forward, (packed, weights, out), packed, traits)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of the weights is rounded from fp32 sums over columns."""
        packed, weights = ctx.saved_tensors
        grad_packed, shares = torch.empty_like(packed), None
        if weights is not None:  # each program sums its columns; torch sums the few programs of a row
            tiles = triton.cdiv(grad.shape[-1], _gated_block(grad.shape[-1]))
            shares = torch.empty((*weights.shape, tiles), dtype=torch.float32, device=grad.device)
        tensors = (grad.contiguous(), packed, weights, shares, grad_packed)
        _gated_launch(_gated_backward, tensors, packed, ctx.traits)
        if shares is None:
            return grad_packed, None, None
        total = shares.squeeze(-1) if shares.shape[-1] == 1 else shares.sum(-1)  # one tile needs no launch
        return grad_packed, None, total.to(weights.dtype)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        contiguous = x.contiguous()
        ctx.save_for_backward(contiguous)
        out = torch.empty_like(contiguous)
        grid = (triton.cdiv(contiguous.numel(), _BLOCK),)
        _squared_relu_forward[grid](contiguous, out, contiguous.numel(), BLOCK=_BLOCK, num_warps=_NUM_WARPS)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), _BLOCK),)
        _squared_relu_backward[grid](grad.contiguous(), x, grad_x, x.numel(), BLOCK=_BLOCK, num_warps=_NUM_WARPS)
        return grad_x


def gated_triton(x: Tensor, traits: GateTraits) -> Tensor:
    """Apply a gated activation, [..., 2 f] -> [..., f]: two reads, one write; backward three reads, two writes."""
    return _Gated.apply(x, traits, None)


def weighted_gated_triton(x: Tensor, weights: Tensor, traits: GateTraits) -> Tensor:
    """Apply a gated activation and multiply each token by ``weights`` [...]; differentiable in both."""
    return _Gated.apply(x, traits, weights)


def squared_relu_triton(x: Tensor) -> Tensor:
    """Return max(x, 0)^2, any shape; saves ``x`` for backward."""
    return _SquaredReLU.apply(x)
