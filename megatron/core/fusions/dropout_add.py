"""Fused dropout and residual addition, one pass over memory in each direction.

    y = residual + keep x / (1 - p)        dresidual = dy        dx = keep dy / (1 - p)

``keep`` is a pure function of coordinates: Philox4x32-10 (Salmon et al. 2011) on the counter (feature // 8, position,
low and high word of the sample) with a 64-bit key; each of the eight 16-bit lanes of its four words decides one
feature. The bits equal ``DropoutStream.keep_mask``. Backward regenerates them, so that only the coordinates are saved.

Legend: s sequence, b batch, h hidden."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

_BLOCKS, _NUM_WARPS = 256, 8
"""Counters per program, eight features each: one per thread."""


class Draw(NamedTuple):
    """Key, coordinates and threshold of a dropout mask."""

    key: int
    """64-bit key of the site."""
    sample_b: Tensor
    """Global sample index, int64 [b]; or [s] if b is 1."""
    position_s: Tensor
    """Global position, int64 [s]."""
    threshold: int
    """Number of lane values, of 2**16, that drop a feature: the rate in units of 2**-16."""


if triton is not None:

    @triton.jit
    def philox_words(c0, c1, c2, c3, k0, k1):
        """Return the four output words of ten Philox4x32 rounds on the counters (c0, c1, c2, c3) with the key (k0, k1);
        all are uint32, counters of one shape."""
        m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
        m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
        w0 = tl.full(c0.shape, 0x9E3779B9, tl.uint32)
        w1 = tl.full(c0.shape, 0xBB67AE85, tl.uint32)
        for _ in tl.static_range(10):
            high_0, low_0 = tl.umulhi(c0, m0), c0 * m0
            high_1, low_1 = tl.umulhi(c2, m1), c2 * m1
            c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
            k0, k1 = k0 + w0, k1 + w1
        return c0, c1, c2, c3

    # keys are not specialized: each key that is 1 or divisible by 16 would compile another kernel
    @triton.jit(do_not_specialize=["key_low", "key_high"])
    def _dropout_kernel(
        x, residual, out, samples, positions, key_low, key_high, threshold, scale, num_samples, batch, width, tiles,
        ADDS: tl.constexpr, BLOCKS: tl.constexpr,
    ):  # fmt: skip
        """Write 8 * BLOCKS features of one token of dropout(x), plus ``residual`` if ADDS, to ``out``. Eight features
        share one Philox counter of (block, position, sample); a feature is kept if its signed 16-bit lane is at least
        ``threshold`` - 2^15, and multiplied by ``scale``. fp32, rounded once."""
        token = (tl.program_id(0) // tiles).to(tl.int64)
        block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
        zero = tl.zeros((BLOCKS,), dtype=tl.uint32)
        # token = position * batch + row: samples [b] repeat per position; samples [s] (batch 1) are one per token
        sample = tl.load(samples + token % num_samples)
        position = tl.load(positions + token // batch)
        word_0, word_1, word_2, word_3 = philox_words(
            block.to(tl.uint32), zero + position.to(tl.uint32), zero + sample.to(tl.uint32),
            zero + (sample >> 32).to(tl.uint32), zero + key_low.to(tl.uint32), zero + key_high.to(tl.uint32),
        )  # fmt: skip
        # lanes 2 n and 2 n + 1 are the low and high half of word n
        lane = tl.arange(0, 8)[None, :]
        low = tl.where(lane < 2, word_0[:, None], word_1[:, None])
        high = tl.where(lane < 6, word_2[:, None], word_3[:, None])
        word = tl.where(lane < 4, low, high)
        bits = (word >> ((lane & 1) * 16).to(tl.uint32)) & 0xFFFF
        keep = (bits ^ 0x8000).to(tl.int32) >= threshold  # the lanes of keep_mask are signed
        feature = block[:, None] * 8 + lane
        inside = feature < width
        at = token * width + feature
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(keep, value * scale, 0.0)
        if ADDS:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def signed_word(word: int) -> int:
    """Return the same 32 bits as an int32: the kernel's argument then has one type for all keys."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _launch(x: Tensor, residual: Tensor | None, out: Tensor, draw: Draw) -> None:
    """All tensors are contiguous (not checked); kept values are divided by 1 - rate."""
    length, batch, width = x.shape
    tiles = triton.cdiv(width, 8 * _BLOCKS)
    _dropout_kernel[(length * batch * tiles,)](
        x, x if residual is None else residual, out, draw.sample_b, draw.position_s,
        signed_word(draw.key & 0xFFFFFFFF), signed_word(draw.key >> 32), draw.threshold,
        65536 / (65536 - draw.threshold),
        len(draw.sample_b), batch, width, tiles, ADDS=residual is not None, BLOCKS=_BLOCKS, num_warps=_NUM_WARPS,
    )  # fmt: skip


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, draw: Draw) -> Tensor:
        """Saves only the coordinates, not the mask."""
        ctx.save_for_backward(draw.sample_b, draw.position_s)
        ctx.key, ctx.threshold, ctx.dtype, ctx.adds = draw.key, draw.threshold, x.dtype, residual is not None
        out = torch.empty(x.shape, dtype=x.dtype if residual is None else residual.dtype, device=x.device)
        _launch(x.contiguous(), None if residual is None else residual.contiguous(), out, draw)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Regenerates the mask."""
        grad = grad.contiguous()
        grad_x = torch.empty(grad.shape, dtype=ctx.dtype, device=grad.device)
        sample_b, position_s = ctx.saved_tensors
        _launch(grad, None, grad_x, Draw(ctx.key, sample_b, position_s, ctx.threshold))
        return grad_x, grad if ctx.adds else None, None


def dropout_add_triton(x: Tensor, residual: Tensor | None, draw: Draw) -> Tensor:
    """Apply dropout to ``x`` [s, b, h] and add ``residual`` if given; the result has the dtype of the residual or x."""
    draw = draw._replace(sample_b=draw.sample_b.contiguous(), position_s=draw.position_s.contiguous())
    return _DropoutAdd.apply(x, residual, draw)
