"""Fused residual addition and RMSNorm or LayerNorm, one pass over memory in each direction.

    s = x [+ branch]        the residual stream, rounded to the dtype of x
    y = (s - m) r (w + o) [+ b],  r = 1 / sqrt(mean((s - m)^2) + eps),  m = mean(s) for LayerNorm, 0 for RMSNorm
    ds = ds' + r (g - mean(g) - n mean(g n)),  g = dy (w + o),  n = (s - m) r   (mean(g) for LayerNorm only)
    dx = dbranch = ds,  dw = sum_t dy n,  db = sum_t dy

``ds'`` is the gradient of s from the residual stream; adding it here saves autograd's separate pass for the sum. o is 1
for weights that are stored minus one (apply_layernorm_1p). Forward saves s, and r (and m) in fp32 per row. Weight
gradients are summed in two stages (rows of a program, then programs) in a fixed order: same bits every run.

With delayed fp8 scales forward can write the fp8 copy of y in place of y, for the only linear layer that reads it: one
byte per element instead of two bytes that a cast reads again. Values are rounded to the weight's dtype first, as for a
separate cast; the compiler may add a row's squares in another order than in the kernel without a cast, so that about
ten in a million bytes and gradients differ by one rounding (on an H200). A program has full rows: the layer makes the
transposed copy from the fp8 one, which is still in the cache.

Legend: t rows (all leading dims), h normalized dim."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.dispatch import ByDevice, kernels_serve, num_sms
from megatron.core.fusions.fp8_cast import CastTarget, Copies, Quantized, carry, new_amax, note_amax
from megatron.core.fusions.installed_triton import tl, triton
from megatron.core.fusions.rms_norm import rms_norm

WIDEST = 16384
"""Maximum row width: a program holds a full row in registers."""
PROGRAMS_PER_SM = 2
"""Programs per SM in the backward pass; each writes partial sums of weight gradients."""
NARROW, PIPELINED = 1024, 4096
"""Backward tuning: up to width NARROW a program takes several rows at once, up to PIPELINED it prefetches the next
rows, so that enough loads are in flight to saturate the memory."""


class NormTraits(NamedTuple):
    """Kind, epsilon and weight offset of a norm."""

    eps: float
    centred: bool
    """Whether it is LayerNorm rather than RMSNorm."""
    offset: float
    """Constant added to the stored weight."""
    notes_amax: bool = False
    """Whether kernels note the largest magnitudes of y and dx, for casts to fp8 (``fp8_cast.note_amax``)."""


class Normalize(Protocol):
    def __call__(
        self, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, traits: NormTraits, /
    ) -> tuple[Tensor, Tensor]:
        """Return (s, y) for ``x`` [..., h], a branch of this shape or None, ``weight`` and ``bias`` [h]. s is ``x``
        itself without a branch; y has the weight's dtype."""


def normalize_plain(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, traits: NormTraits
) -> tuple[Tensor, Tensor]:
    """Return (s, y): the residual stream s = x + branch (``x`` itself without a branch) and its normalized values y in
    the weight's dtype. Torch operations; statistics in fp32 for 16-bit inputs, else in the dtype of ``x``."""
    stream = x if branch is None else x + branch
    gain = weight + traits.offset if traits.offset else weight
    gain = gain.to(stream.dtype)  # an fp32 residual stream over 16-bit weights
    if traits.centred:
        normed = F.layer_norm(stream, gain.shape, gain, None if bias is None else bias.to(stream.dtype), traits.eps)
    else:
        normed = rms_norm(stream, gain, traits.eps)
    return stream, normed.to(weight.dtype)


if triton is not None:
    from megatron.core.fusions.fp8_cast import fp8_value, magnitude_bits, raise_amax

    @triton.jit
    def _norm_forward(
        x, branch, weight, bias, stream, out, means, rstds, amax_bits, factor, rows, width, eps, offset,
        ADDS: tl.constexpr, CENTRED: tl.constexpr, BIASED: tl.constexpr, NOTED: tl.constexpr, CASTS: tl.constexpr,
        ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute ROWS rows: with ADDS write x + branch, rounded, to ``stream``; write the normalized, weighted rows to
        ``out``, and the inverse deviation (with CENTRED also the mean) per row in fp32. Normalizes the rounded sum,
        which backward reads. BIASED adds ``bias``. NOTED > 0 raises one of NOTED ``amax_bits`` to the largest
        magnitude of the rows. CASTS writes them to ``out`` in fp8, times ``factor``."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if ADDS:
            value += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
            rounded = value.to(stream.dtype.element_ty)  # normalize the rounded value, which backward reads
            tl.store(stream + at, rounded, mask=inside)
            value = rounded.to(tl.float32)
        if CENTRED:
            mean = tl.sum(value, axis=1) / width
            tl.store(means + row, mean, mask=row < rows)
            value = tl.where(inside, value - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
        tl.store(rstds + row, rstd, mask=row < rows)
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
        normed = value * rstd[:, None] * scale[None, :]
        if BIASED:
            normed += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        rounded_norm = normed.to(weight.dtype.element_ty)
        if CASTS:
            copy = fp8_value(rounded_norm.to(tl.float32), tl.load(factor), out.dtype.element_ty)
            tl.store(out + at, copy, mask=inside)
        else:
            tl.store(out + at, rounded_norm, mask=inside)
        if NOTED:
            raise_amax(amax_bits, tl.where(inside, rounded_norm.to(tl.float32), 0.0), NOTED)

    @triton.jit
    def _norm_backward(
        grad, skip, stream, weight, means, rstds, grad_x, weight_sums, bias_sums, amax_bits, rows, width, offset,
        SKIPS: tl.constexpr, CENTRED: tl.constexpr, BIASED: tl.constexpr, NOTED: tl.constexpr, STEPS: tl.constexpr,
        STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Write ``grad_x`` of STEPS times ROWS rows, with ``skip`` added if SKIPS, and this program's partial sums of
        the weight gradient (BIASED: also the bias gradient) over these rows, fp32, to its row of ``weight_sums`` and
        ``bias_sums``. NOTED as in forward, for ``grad_x``."""
        program = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        within = column < width
        scale = tl.load(weight + column, mask=within, other=0.0).to(tl.float32) + offset
        weight_sum = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        bias_sum = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        most = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
        for step in tl.range(STEPS, num_stages=STAGES):
            row = (program * STEPS + step) * ROWS + tl.arange(0, ROWS)
            inside = (row < rows)[:, None] & within[None, :]
            at = row[:, None] * width + column[None, :]
            upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            normed = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
            rstd = tl.load(rstds + row, mask=row < rows, other=0.0)
            if SKIPS:  # load before the sums, so that the load overlaps them
                carried = tl.load(skip + at, mask=inside, other=0.0).to(tl.float32)
            if CENTRED:
                normed -= tl.load(means + row, mask=row < rows, other=0.0)[:, None]
            normed *= rstd[:, None]
            scaled = upstream * scale[None, :]  # zero beyond the width, where normed may be nonzero
            result = scaled - normed * (tl.sum(scaled * normed, axis=1) / width)[:, None]
            if CENTRED:
                result -= (tl.sum(scaled, axis=1) / width)[:, None]
            result *= rstd[:, None]
            if SKIPS:
                result += carried
            rounded = result.to(grad_x.dtype.element_ty)
            tl.store(grad_x + at, rounded, mask=inside)
            if NOTED:
                most = tl.maximum(most, magnitude_bits(tl.where(inside, rounded.to(tl.float32), 0.0)))
            # sums stay per row slot until the end: one reduction per program instead of one per step
            weight_sum += upstream * normed
            if BIASED:
                bias_sum += upstream
        if NOTED:
            tl.atomic_max(amax_bits + program % NOTED, tl.max(tl.max(most, axis=1), axis=0))
        tl.store(weight_sums + program * width + column, tl.sum(weight_sum, axis=0), mask=within)
        if BIASED:
            tl.store(bias_sums + program * width + column, tl.sum(bias_sum, axis=0), mask=within)


def _tile(width: int) -> dict[str, int]:
    """At least 1024 elements (several narrow rows) per program, 8 to 32 per thread."""
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, rows * block // 512))}


def _backward_tile(width: int) -> dict[str, int]:
    """8 times the rows up to width NARROW: for BERT-large (width 1024, H200) 19 ms per step, 31 with forward's
    options."""
    tile = {**_tile(width), "STAGES": 2 if width <= PIPELINED else 1}
    if width > NARROW:
        return tile
    return {**tile, "ROWS": 8 * NARROW // tile["BLOCK"], "num_warps": 8}


def _in_dtype(grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if grad is None or dtype is None else grad.to(dtype)


class _Normalize(torch.autograd.Function):
    """Returns ``x`` itself as the stream if there is no branch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, traits: NormTraits,
        target: CastTarget | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """With a ``target`` y carries its fp8 copy and no values. Saves s, the weight, and fp32 statistics per row."""
        width = x.shape[-1]
        rows = x.numel() // width
        contiguous = x.contiguous()
        stream = contiguous if branch is None else torch.empty_like(contiguous)
        out = torch.empty(x.shape, dtype=weight.dtype if target is None else target.dtype, device=x.device)
        rstds = torch.empty(rows, dtype=torch.float32, device=x.device)
        means = torch.empty_like(rstds) if traits.centred else rstds
        tile = _tile(width)
        amax = target.noted if target is not None else new_amax(x.device) if traits.notes_amax else None
        _norm_forward[(triton.cdiv(rows, tile["ROWS"]),)](
            contiguous, contiguous if branch is None else branch.contiguous(), weight,
            weight if bias is None else bias, stream,
            out, means, rstds, rstds if amax is None else amax, rstds if target is None else target.scale.factor,
            rows, width, traits.eps, traits.offset, ADDS=branch is not None, CENTRED=traits.centred,
            BIASED=bias is not None, NOTED=0 if amax is None else len(amax), CASTS=target is not None, **tile,
        )  # fmt: skip
        if target is not None:
            out = carry(Copies(Quantized(out.view(rows, width), target.scale.inverse), None), x.shape, weight.dtype)
        elif amax is not None:
            note_amax(out, amax)
        ctx.save_for_backward(stream, weight, means, rstds)
        ctx.traits, ctx.branch_dtype = traits, None if branch is None else branch.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)  # no zero gradient for an unused stream
        return x if branch is None else stream, out

    @staticmethod
    def backward(ctx: Any, skip: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """``skip``: gradient of s, added to the result (None: unused). Sums are fp32 in a fixed order."""
        stream, weight, means, rstds = ctx.saved_tensors
        if grad is None:
            return skip, _in_dtype(skip, ctx.branch_dtype), None, None, None, None
        width, biased = stream.shape[-1], ctx.bias_dtype is not None
        rows = stream.numel() // width
        tile = _backward_tile(width)
        most = PROGRAMS_PER_SM * num_sms(stream.device)
        steps = max(1, triton.cdiv(rows, most * tile["ROWS"]))  # at least 1 for an input without rows
        programs = triton.cdiv(rows, steps * tile["ROWS"])
        grad_x = torch.empty_like(stream)
        sums = torch.empty(1 + biased, programs, width, dtype=torch.float32, device=stream.device)
        grad, amax = grad.contiguous(), new_amax(grad.device) if ctx.traits.notes_amax else None
        _norm_backward[(programs,)](
            grad, grad if skip is None else skip.contiguous(), stream, weight, means, rstds, grad_x, sums[0], sums[-1],
            sums if amax is None else amax, rows, width, ctx.traits.offset,
            SKIPS=skip is not None, CENTRED=ctx.traits.centred, BIASED=biased, NOTED=0 if amax is None else len(amax),
            STEPS=steps, **tile,
        )  # fmt: skip
        if amax is not None:
            note_amax(grad_x, amax)
        grads = sums.sum(1).to(weight.dtype)  # weight and bias gradients in one reduction
        grad_bias = grads[1].to(ctx.bias_dtype) if biased else None
        return grad_x, _in_dtype(grad_x, ctx.branch_dtype), grads[0], grad_bias, None, None


def normalize_triton(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, traits: NormTraits,
    target: CastTarget | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implement :class:`Normalize` with one kernel in forward, and one plus the sum of its partial sums in backward.
    With a ``target`` y is a carrier of its fp8 copy (``fp8_cast.carry``): only the linear layer of the target may read
    it. ``weight`` then has 16 bits."""
    return _Normalize.apply(x, branch, weight, bias, traits, target)


def choose_normalize(dtype: torch.dtype, width: int, enabled: bool = True) -> Normalize:
    """Return the implementation for weights of ``dtype`` and rows of ``width``; ``enabled`` False selects torch."""
    if kernels_serve(dtype, enabled) and width <= WIDEST:
        return ByDevice(normalize_triton, normalize_plain)
    return normalize_plain
