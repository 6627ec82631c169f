"""Causal convolution of a few tokens per channel and SiLU in one kernel in each direction: plain torch reads and writes
the tensor about ten times, and rounds after every tap.

    y_t = bias + sum_d w_d x_(t - d),   out = y sigmoid(y);   x_(t - d) counts if its document continues up to t

A program walks along the tokens of some channels and keeps the last three inputs in registers, 0 where a document
begins. The backward kernel computes y again and also keeps the unfinished gradients of three inputs. Both read each
element once. Gradients of weights are summed per program and then by torch, in a fixed order.

Inputs are rows of a projection, interleaved per head: no copy. The output has the same part of all heads side by side
(queries, keys, values): views of it are inputs of kernels.

Legend: s tokens, b batch, a heads, p channels of a head, c = a p, w taps (2 to 4); distance d is tap w - 1 - d of the
weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.fusions.dispatch import in_rows, row_stride
from megatron.core.fusions.installed_triton import tl, triton

_TOKENS, _CHANNELS, _NUM_WARPS = 64, 512, 4
"""Tokens and channels of a program."""

if triton is not None:

    @triton.jit
    def _input(x, tail, token, row, channel, length, batch, channels, x_t, TAPS: tl.constexpr):
        """Return a row of (tail; x), whose tail has negative tokens, in fp32; zeros outside. ``x``: pointers [c]."""
        place, valid = token * batch + row.to(tl.int64), channel < channels
        value = tl.load(x + place * x_t, mask=valid & (token >= 0) & (token < length), other=0.0)
        at = tail + (row * (TAPS - 1) + TAPS - 1 + token) * channels + channel
        early = tl.load(at, mask=valid & (token < 0) & (token > -TAPS), other=0.0)
        return value.to(tl.float32) + early.to(tl.float32)

    @triton.jit
    def _columns(channel, heads, x_a: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr):
        """Return the places of channels in rows of x and in rows of the output, for parts of P0, P1 and P2 channels."""
        head, within = channel // (P0 + P1 + P2), channel % (P0 + P1 + P2)
        third = heads * (P0 + P1) + head * P2 + within - (P0 + P1)
        later = tl.where(within < P0 + P1, heads * P0 + head * P1 + within - P0, third)
        return head * x_a + within, tl.where(within < P0, head * P0 + within, later)

    @triton.jit
    def _link(follows, token, row, length, batch, DOCUMENTS: tl.constexpr):
        """Return 1 if the token follows another one of its document, else 0."""
        link = 1.0
        if DOCUMENTS:
            inside = (token >= 0) & (token < length)
            link = (tl.load(follows + token * batch + row, mask=inside, other=1) != 0).to(tl.float32)
        return link

    @triton.jit
    def _before(
        x, tail, follows, token, row, channel, length, batch, channels, x_t,
        TAPS: tl.constexpr, DOCUMENTS: tl.constexpr,
    ):  # fmt: skip
        """Return the three inputs before a token that its predecessor reads, nearest first, and the two last links."""
        link1 = _link(follows, token - 1, row, length, batch, DOCUMENTS)
        link2 = _link(follows, token - 2, row, length, batch, DOCUMENTS)
        x1 = _input(x, tail, token - 1, row, channel, length, batch, channels, x_t, TAPS)
        x2 = _input(x, tail, token - 2, row, channel, length, batch, channels, x_t, TAPS) * link1
        x3 = _input(x, tail, token - 3, row, channel, length, batch, channels, x_t, TAPS) * (link1 * link2)
        return x1, x2, x3, link1, link2

    @triton.jit
    def _weights(weight, channel, channels, TAPS: tl.constexpr):
        """Return the weights of distances 0 to 3 in fp32."""
        last, valid = weight + channel * TAPS + TAPS - 1, channel < channels
        w0, w1 = tl.load(last, mask=valid, other=0.0), tl.load(last - 1, mask=valid, other=0.0)
        w2 = tl.load(last - 2, mask=valid & (TAPS > 2), other=0.0)
        w3 = tl.load(last - 3, mask=valid & (TAPS > 3), other=0.0)
        return w0.to(tl.float32), w1.to(tl.float32), w2.to(tl.float32), w3.to(tl.float32)

    @triton.jit
    def _forward_kernel(
        x, tail, follows, weight, bias, out, length, batch, channels, heads, x_t, x_a: tl.constexpr,
        P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
        TAPS: tl.constexpr, BIAS: tl.constexpr, DOCUMENTS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        channel, first, row = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1) * T, tl.program_id(2)
        column, target = _columns(channel, heads, x_a, P0, P1, P2)
        x += column
        w0, w1, w2, w3 = _weights(weight, channel, channels, TAPS)
        constant = tl.zeros((C,), tl.float32)
        if BIAS:
            constant += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
        x1, x2, x3, _, _ = _before(x, tail, follows, first, row, channel, length, batch, channels, x_t, TAPS, DOCUMENTS)
        ahead = _input(x, tail, first, row, channel, length, batch, channels, x_t, TAPS)
        for token in range(first, tl.minimum(first + T, length)):
            x0, link = ahead, _link(follows, token, row, length, batch, DOCUMENTS)
            ahead = _input(x, tail, token + 1, row, channel, length, batch, channels, x_t, TAPS)
            x1, x2, x3 = x1 * link, x2 * link, x3 * link
            y = constant + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            at = out + (token * batch + row.to(tl.int64)) * channels + target
            tl.store(at, (y / (1.0 + tl.exp(-y))).to(out.dtype.element_ty), mask=channel < channels)
            x1, x2, x3 = x0, x1, x2

    @triton.jit
    def _backward_kernel(
        x, tail, follows, weight, bias, grad, grad_x, grad_tail, partial, length, batch, channels, heads, x_t,
        x_a: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
        TAPS: tl.constexpr, BIAS: tl.constexpr, DOCUMENTS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Write the gradients of T inputs (tail; x), and the sums over T outputs for the gradients of the weight and
        the bias to ``partial`` [programs along the tokens, b, w + 1, c]."""
        channel, first, row = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1) * T - 3, tl.program_id(2)
        valid, w = channel < channels, tl.zeros((C,), tl.float32)
        column, target = _columns(channel, heads, x_a, P0, P1, P2)
        x += column
        w0, w1, w2, w3 = _weights(weight, channel, channels, TAPS)
        constant, s0, s1, s2, s3, total, d1, d2, d3 = w, w, w, w, w, w, w, w, w
        if BIAS:
            constant += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
        x1, x2, x3, link1, link2 = _before(
            x, tail, follows, first, row, channel, length, batch, channels, x_t, TAPS, DOCUMENTS
        )
        ahead = _input(x, tail, first, row, channel, length, batch, channels, x_t, TAPS)
        for token in range(first, first + T + 3):
            x0, link = ahead, _link(follows, token, row, length, batch, DOCUMENTS)
            ahead = _input(x, tail, token + 1, row, channel, length, batch, channels, x_t, TAPS)
            place = (token * batch + row.to(tl.int64)) * channels + target
            g = tl.load(grad + place, mask=valid & (token >= 0) & (token < length), other=0.0).to(tl.float32)
            x1, x2, x3 = x1 * link, x2 * link, x3 * link
            y = constant + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            share = 1.0 / (1.0 + tl.exp(-y))
            dy = g * share * (1.0 + y * (1.0 - share))
            complete = d3 + w3 * dy * (link * link1 * link2)
            d3, d2, d1 = d2 + w2 * dy * (link * link1), d1 + w1 * dy * link, w0 * dy
            before = token - 3
            value, stored = complete.to(grad_x.dtype.element_ty), valid & (before >= first) & (before < length)
            place = (before * batch + row.to(tl.int64)) * channels + channel
            tl.store(grad_x + place, value, mask=stored & (before >= 0))
            early = grad_tail + (row * (TAPS - 1) + TAPS - 1 + before) * channels + channel
            tl.store(early, value, mask=stored & (before < 0) & (before > -TAPS))
            dy = tl.where(token < first + T, dy, 0.0)  # the next program counts the others
            s0, s1, s2, s3, total = s0 + dy * x0, s1 + dy * x1, s2 + dy * x2, s3 + dy * x3, total + dy
            x1, x2, x3, link1, link2 = x0, x1, x2, link, link1
        sums = partial + (tl.program_id(1).to(tl.int64) * batch + row) * (TAPS + 1) * channels + channel
        tl.store(sums + TAPS * channels, total, mask=valid)
        tl.store(sums + (TAPS - 1) * channels, s0, mask=valid)
        tl.store(sums + (TAPS - 2) * channels, s1, mask=valid)
        tl.store(sums + (TAPS - 3) * channels, s2, mask=valid & (TAPS > 2))
        tl.store(sums + (TAPS - 4) * channels, s3, mask=valid & (TAPS > 3))


class _ConvolutionSiLU(torch.autograd.Function):
    """Saves the inputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, follows: Tensor | None, tail: Tensor, weight: Tensor, bias: Tensor | None,
        parts: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, follows, tail, weight, bias)
        ctx.parts = parts
        out = torch.empty((*x.shape[:2], len(weight)), dtype=x.dtype, device=x.device)
        tensors, numbers, constants = _arguments(x, follows, tail, weight, bias, parts)
        grid = (triton.cdiv(len(weight), _CHANNELS), triton.cdiv(len(x), _TOKENS), x.shape[1])
        _forward_kernel[grid](*tensors, out, *numbers, **constants)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, follows, tail, weight, bias = ctx.saved_tensors
        (length, batch), (channels, taps) = x.shape[:2], weight.shape
        tensors, numbers, constants = _arguments(x, follows, tail, weight, bias, ctx.parts)
        tiles = triton.cdiv(length + 3, _TOKENS)
        grad_x, grad_tail = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(tail)
        partial = torch.empty((tiles, batch, taps + 1, channels), dtype=torch.float32, device=x.device)
        _backward_kernel[(triton.cdiv(channels, _CHANNELS), tiles, batch)](
            *tensors, grad.contiguous(), grad_x, grad_tail, partial, *numbers, **constants
        )
        sums = partial.sum((0, 1))
        of_bias = None if bias is None else sums[taps].to(bias.dtype)
        return grad_x, None, grad_tail, sums[:taps].t().to(weight.dtype), of_bias, None


def _arguments(
    x: Tensor, follows: Tensor | None, tail: Tensor, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...]
) -> tuple[list[Tensor], list[int], dict[str, int]]:
    """Return the inputs, sizes and strides, and the constants."""
    tensors = [x, tail, x if follows is None else follows, weight, x if bias is None else bias]
    widths = dict(zip(("P0", "P1", "P2"), (*parts, 0, 0)))
    flags = {"TAPS": weight.shape[1], "BIAS": bias is not None, "DOCUMENTS": follows is not None}
    # constant stride of heads: the compiler derives the alignment of loads from it
    constants = {**widths, **flags, "x_a": x.stride(2), "T": _TOKENS, "C": _CHANNELS, "num_warps": _NUM_WARPS}
    return tensors, [*x.shape[:2], len(weight), x.shape[2], row_stride(x)], constants


def convolution_silu(
    x: Tensor, follows: Tensor | None, tail: Tensor, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...]
) -> Tensor:
    """Return SiLU of the convolution [s, b, c] of ``x`` [s, b, a, p] by kernels: the first ``parts`` channels of all
    heads, then the next ones (up to three parts). ``ssm/convolution.py`` describes the other arguments."""
    follows = None if follows is None else follows.contiguous()
    return _ConvolutionSiLU.apply(in_rows(x), follows, tail.contiguous(), weight.contiguous(), bias, parts)
