"""RMS norm of rows of channels, with a gate before or after it, in one kernel in each direction: plain torch converts
to fp32 and passes over memory about ten times.

    n = v r,  r = 1 / sqrt(mean(v^2) + eps),  v = x or x act(z);   y = scale n w, or scale n w act(z)

act is SiLU or sigmoid. The kernels compute in fp32; the inputs are saved. Weight gradients are summed per program and
then by torch, in a fixed order.

Legend: t tokens, h heads (or groups), c channels of a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.fusions.dispatch import in_rows, row_stride
from megatron.core.fusions.installed_triton import tl, triton

_ELEMENTS = 2048
"""Elements of a program's tile, if a row has fewer."""


@dataclass(frozen=True)
class GatedNormTraits:
    """Formula of the norm."""

    eps: float
    scale: float = 1.0
    gate_first: bool = False
    """Whether the gate multiplies x before the norm."""
    sigmoid: bool = False
    """Whether act is sigmoid rather than SiLU."""


if triton is not None:

    @triton.jit
    def _load(x, token, head, tokens, per, stride_t, stride_a, SIZE: tl.constexpr, PADDED: tl.constexpr):
        """Load [tokens, PADDED] of a head in fp32. ``per`` consecutive heads are contiguous."""
        channel = tl.arange(0, PADDED)
        at = token[:, None].to(tl.int64) * stride_t + (head // per) * stride_a + (head % per) * SIZE + channel[None, :]
        inside = (token < tokens)[:, None] & (channel < SIZE)[None, :]
        return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _store(base, values, token, head, tokens, heads, SIZE: tl.constexpr, PADDED: tl.constexpr):
        channel = tl.arange(0, PADDED)
        at = (token[:, None].to(tl.int64) * heads + head) * SIZE + channel[None, :]
        inside = (token < tokens)[:, None] & (channel < SIZE)[None, :]
        tl.store(base + at, values.to(base.dtype.element_ty), mask=inside)

    @triton.jit
    def _load_weight(weight, head, weights, WEIGHT: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
        """Return [1, PADDED]; head h has row h % ``weights``. Ones without WEIGHT."""
        values = tl.full((1, PADDED), 1.0, tl.float32)
        if WEIGHT:
            channel = tl.arange(0, PADDED)[None, :]
            at = weight + (head % weights) * SIZE + channel
            values = tl.load(at, mask=channel < SIZE, other=0.0).to(tl.float32)
        return values

    @triton.jit
    def _forward_kernel(
        x, gate, weight, out, tokens, heads, weights, x_per, x_t, x_a, g_per, g_t, g_a, scale, eps,
        GATE: tl.constexpr, SIGMOID: tl.constexpr, WEIGHT: tl.constexpr,
        SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """GATE: 0 none, 1 after, 2 before the norm."""
        token, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
        values = _load(x, token, head, tokens, x_per, x_t, x_a, SIZE, PADDED)
        active = 1.0
        if GATE > 0:
            z = _load(gate, token, head, tokens, g_per, g_t, g_a, SIZE, PADDED)
            active = 1.0 / (1.0 + tl.exp(-z))
            if not SIGMOID:
                active = z * active
        if GATE == 2:
            values = values * active
        values = values * tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None]
        values = values * (scale * _load_weight(weight, head, weights, WEIGHT, SIZE, PADDED))
        if GATE == 1:
            values = values * active
        _store(out, values, token, head, tokens, heads, SIZE, PADDED)

    @triton.jit
    def _backward_kernel(
        x, gate, weight, grad, grad_x, grad_gate, partial, tokens, heads, weights, x_per, x_t, x_a, g_per, g_t, g_a,
        scale, eps, GATE: tl.constexpr, SIGMOID: tl.constexpr, WEIGHT: tl.constexpr,
        SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """Write contiguous gradients, and with WEIGHT the sums of a tile to ``partial`` [tiles of tokens, h, c]."""
        token, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
        values = _load(x, token, head, tokens, x_per, x_t, x_a, SIZE, PADDED)
        factor = _load_weight(weight, head, weights, WEIGHT, SIZE, PADDED)
        g = scale * _load(grad, token, head, tokens, heads, heads * SIZE, 0, SIZE, PADDED)
        normed, active, slope = values, 1.0, 0.0
        if GATE > 0:
            z = _load(gate, token, head, tokens, g_per, g_t, g_a, SIZE, PADDED)
            share = 1.0 / (1.0 + tl.exp(-z))
            if SIGMOID:
                active, slope = share, share * (1.0 - share)
            else:
                active, slope = z * share, share * (1.0 + z * (1.0 - share))
        if GATE == 2:
            normed = values * active
        root = tl.rsqrt(tl.sum(normed * normed, 1) / SIZE + eps)[:, None]
        normed = normed * root
        of_normed, of_weight = g * factor, g * normed
        if GATE == 1:
            _store(grad_gate, of_normed * normed * slope, token, head, tokens, heads, SIZE, PADDED)
            of_normed, of_weight = of_normed * active, of_weight * active
        result = root * (of_normed - normed * (tl.sum(of_normed * normed, 1) / SIZE)[:, None])
        if GATE == 2:
            _store(grad_gate, result * values * slope, token, head, tokens, heads, SIZE, PADDED)
            result = result * active
        _store(grad_x, result, token, head, tokens, heads, SIZE, PADDED)
        if WEIGHT:
            channel = tl.arange(0, PADDED)
            at = partial + (tl.program_id(0).to(tl.int64) * heads + head) * SIZE + channel
            tl.store(at, tl.sum(of_weight, 0), mask=channel < SIZE)


def _arguments(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, traits: GatedNormTraits
) -> tuple[tuple[int, int], list[Any], dict[str, Any]]:
    """Return the grid, the arguments after the tensors, and the constants."""
    tokens, heads, size = x.shape[0] * x.shape[1], x.shape[2], x.shape[3]
    padded = triton.next_power_of_2(size)
    rows = max(1, _ELEMENTS // padded)
    layout = [heads // part.shape[2] for part in (x, x if gate is None else gate)]
    strides = [(row_stride(part), part.stride(2)) for part in (x, x if gate is None else gate)]
    weights = 1 if weight is None else weight.numel() // size
    numbers = [tokens, heads, weights, layout[0], *strides[0], layout[1], *strides[1], traits.scale, traits.eps]
    order = 0 if gate is None else 2 if traits.gate_first else 1
    constants = {"GATE": order, "SIGMOID": traits.sigmoid, "WEIGHT": weight is not None, "SIZE": size}
    constants |= {"PADDED": padded, "ROWS": rows, "num_warps": 4 if padded <= _ELEMENTS else 16}
    return (triton.cdiv(tokens, rows), heads), numbers, constants


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, traits: GatedNormTraits) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.traits = traits
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grid, numbers, constants = _arguments(x, gate, weight, traits)
        tensors = (x if tensor is None else tensor for tensor in (gate, weight))
        _forward_kernel[grid](x, *tensors, out, *numbers, **constants)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        grid, numbers, constants = _arguments(x, gate, weight, ctx.traits)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        partial = torch.empty((grid[0], *x.shape[2:]), dtype=torch.float32, device=x.device)
        tensors = (x if tensor is None else tensor for tensor in (gate, weight))
        _backward_kernel[grid](
            x, *tensors, grad.contiguous(), grad_x, grad_x if grad_gate is None else grad_gate, partial, *numbers,
            **constants,
        )  # fmt: skip
        of_weight = None
        if weight is not None:
            of_weight = partial.sum(0).view(-1, weight.numel()).sum(0).view(weight.shape).to(weight.dtype)
        return grad_x, grad_gate, of_weight, None


def gated_norm(x: Tensor, gate: Tensor | None, weight: Tensor | None, traits: GatedNormTraits) -> Tensor:
    """Return y, contiguous, in the shape and dtype of ``x`` [s, b, h, c], by kernels.

    Args:
        x: [s, b, h, c].
        gate: z of the size of ``x``, [s, b, h, c] or [s, b, a, h / a * c]; views of a projection are not copied.
        weight: w, [c] for all heads or [h c]; None: ones.
        traits: the formula."""
    return _GatedNorm.apply(in_rows(x), None if gate is None else in_rows(gate), weight, traits)
