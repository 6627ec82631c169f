"""The two passes over logits of a cross entropy, per row, on one slice (tensor-parallel shard) of the vocabulary.

    statistics   m_t = max_v x_tv        z_t = sum_v exp(x_tv - m_t)        y_t = x_t,label
    gradient     dx_tv = (exp(x_tv - m_t) / z_t - [v = label]) g_t

The caller combines the statistics of all slices; the loss is log z - (y - m). The kernels read 16-bit logits once per
pass (online sums in fp32; Milakov and Gimelshein 2018) and write the gradient once, over the logits if the caller
allows it: no fp32 copy of the logits exists. One program sums a row in a fixed order, so that equal logits give equal
bits. Entries from ``num_true`` on are padding: excluded from sums, with zero gradient.

Legend: t tokens, v stored vocabulary entries of this slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

_CPU_BLOCK, _GPU_BLOCK = 1 << 19, 1 << 25
"""Elements that the torch implementation widens at a time: 2 MiB in fp32, which fits in an L2 cache; more on a GPU."""

_BLOCK, _NUM_WARPS = 8192, 8
"""Logits per program and step of the kernels."""


class Statistics(Protocol):
    def __call__(self, logits_tv: Tensor, label_t: Tensor, num_true: int) -> Tensor:
        """Return [3, t]: maxima, sums of exponentials and label logits, in fp32 (fp64 for fp64 logits), for
        ``logits_tv`` with a contiguous last dim. ``label_t`` int64 is relative to this slice; outside [0, num_true) the
        label logit is 0."""


class Gradient(Protocol):
    def __call__(self, logits_tv: Tensor, label_t: Tensor, softmax: Softmax, grad_t: Tensor, out_tv: Tensor) -> None:
        """Write the logits' gradient, in the dtype of ``out_tv``, to ``out_tv``, which may be ``logits_tv``; ``grad_t``
        is the losses' gradient."""


class Softmax(NamedTuple):
    """Softmax statistics over the full vocabulary (all slices), in fp32 (fp64 for fp64 logits)."""

    maximum_t: Tensor
    total_t: Tensor
    num_true: int
    """Number of real (unpadded) entries in this slice."""


class CrossEntropyPasses(NamedTuple):
    """Implementation of both passes."""

    statistics: Statistics
    gradient: Gradient


def _blocks(logits_tv: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (row slice, its rows, scratch memory, uninitialized and reused) for blocks that fit in a cache."""
    rows = max(1, (_GPU_BLOCK if logits_tv.is_cuda else _CPU_BLOCK) // max(1, logits_tv.shape[1]))
    memory = torch.empty((min(rows, len(logits_tv)), logits_tv.shape[1]), dtype=dtype, device=logits_tv.device)
    for first in range(0, len(logits_tv), rows):
        block = logits_tv[first : first + rows]
        yield slice(first, first + rows), block, memory[: len(block)]


def _label_column(label_t: Tensor, num_true: int) -> tuple[Tensor, Tensor]:
    """Return labels [t, 1], 0 where absent from this slice, and the bool mask of absent labels."""
    absent = ((label_t < 0) | (label_t >= num_true)).unsqueeze(-1)
    return label_t.unsqueeze(-1).masked_fill(absent, 0), absent


def statistics_reference(logits_tv: Tensor, label_t: Tensor, num_true: int) -> Tensor:
    """Return maxima, sums of exponentials and label logits [3, t] of ``logits_tv`` [t, v] in fp32 (fp64 for fp64), over
    the first ``num_true`` entries; see :class:`Statistics`. A slice of padding only gives (-inf, 0, 0). Torch
    operations, one block of rows at a time."""
    dtype = torch.float64 if logits_tv.dtype == torch.float64 else torch.float32
    maximum, total, label_logit = result = torch.zeros((3, len(logits_tv), 1), dtype=dtype, device=logits_tv.device)
    if num_true == 0:
        maximum.fill_(-torch.inf)
        return result.squeeze(-1)
    logits_tv = logits_tv[:, :num_true]
    label, absent = _label_column(label_t, num_true)
    for rows, block, memory in _blocks(logits_tv, dtype):
        maximum[rows] = block.amax(dim=-1, keepdim=True)
        label_logit[rows] = block.gather(-1, label[rows])
        total[rows] = torch.sub(block, maximum[rows], out=memory).exp_().sum(dim=-1, keepdim=True)
    label_logit.masked_fill_(absent, 0)
    return result.squeeze(-1)


def gradient_reference(logits_tv: Tensor, label_t: Tensor, softmax: Softmax, grad_t: Tensor, out_tv: Tensor) -> None:
    """Write the gradient of the logits [t, v] to ``out_tv``, which may be ``logits_tv``, zero for padding; see
    :class:`Gradient`. ``label_t`` and ``softmax.num_true`` are relative to this slice."""
    num_true = softmax.num_true
    out_tv[:, num_true:] = 0
    if num_true == 0:
        return
    maximum, scale = softmax.maximum_t.unsqueeze(-1), (grad_t / softmax.total_t).unsqueeze(-1)
    label, absent = _label_column(label_t, num_true)
    grad_label = -grad_t.unsqueeze(-1).masked_fill(absent, 0)
    for rows, block, memory in _blocks(logits_tv[:, :num_true], maximum.dtype):
        out = out_tv[rows, :num_true]
        # ``out`` may be ``block``: each element is read before it is written
        result = out if out.dtype == memory.dtype else memory
        torch.sub(block, maximum[rows], out=result).exp_().mul_(scale[rows])
        out.copy_(result.scatter_add_(-1, label[rows], grad_label[rows]))


PLAIN = CrossEntropyPasses(statistics_reference, gradient_reference)
FUSED: CrossEntropyPasses | None = None


if triton is not None:

    @triton.jit
    def _cross_entropy_statistics_kernel(
        logits, label, out, tokens, num_true, row_stride, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Write maximum, sum of exponentials (online) and label logit to ``out`` [3, tokens]; one program per row. The
        label logit is 0 if the label is outside of [0, num_true)."""
        row = tl.program_id(0).to(tl.int64)
        row_at = logits + row * row_stride
        maximum = -3.0e38  # finite: a block of -inf must not make inf - inf
        total = 0.0
        for block in range(BLOCKS):
            entry = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row_at + entry, mask=entry < num_true, other=-float("inf")).to(tl.float32)
            larger = tl.maximum(maximum, tl.max(x, axis=0))
            total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger), axis=0)
            maximum = larger
        entry = tl.load(label + row)
        is_here = (entry >= 0) & (entry < num_true)
        tl.store(out + row, maximum)
        tl.store(out + tokens + row, total)
        tl.store(out + 2 * tokens + row, tl.load(row_at + entry, mask=is_here, other=0.0).to(tl.float32))

    @triton.jit
    def _cross_entropy_gradient_kernel(
        logits, label, maximum, total, grad, out, num_true, width, blocks, row_stride, out_stride, BLOCK: tl.constexpr
    ):
        """One program per row and block of the gradient; zero from ``num_true`` on. ``out`` may be ``logits``."""
        row = (tl.program_id(0) // blocks).to(tl.int64)
        entry = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        grad_row = tl.load(grad + row)
        scale = grad_row / tl.load(total + row)
        x = tl.load(logits + row * row_stride + entry, mask=entry < num_true, other=-float("inf")).to(tl.float32)
        value = tl.exp(x - tl.load(maximum + row)) * scale
        value = tl.where(entry == tl.load(label + row).to(tl.int32), value - grad_row, value)
        value = tl.where(entry < num_true, value, 0.0)
        tl.store(out + row * out_stride + entry, value.to(out.dtype.element_ty), mask=entry < width)

    def _statistics_triton(logits_tv: Tensor, label_t: Tensor, num_true: int) -> Tensor:
        """See :class:`Statistics`. A slice of padding only gives (-3e38, 0, 0)."""
        tokens = len(logits_tv)
        out = torch.empty((3, tokens), dtype=torch.float32, device=logits_tv.device)
        if tokens:
            _cross_entropy_statistics_kernel[(tokens,)](
                logits_tv, label_t, out, tokens, num_true, logits_tv.stride(0), BLOCKS=triton.cdiv(num_true, _BLOCK),
                BLOCK=_BLOCK, num_warps=_NUM_WARPS,
            )  # fmt: skip
        return out

    def _gradient_triton(logits_tv: Tensor, label_t: Tensor, softmax: Softmax, grad_t: Tensor, out_tv: Tensor) -> None:
        """See :class:`Gradient`. Last dims are contiguous; zero for padding."""
        tokens, width = logits_tv.shape
        blocks = triton.cdiv(width, _BLOCK)
        if tokens:
            _cross_entropy_gradient_kernel[(tokens * blocks,)](
                logits_tv, label_t, softmax.maximum_t, softmax.total_t, grad_t, out_tv, softmax.num_true, width, blocks,
                logits_tv.stride(0), out_tv.stride(0), BLOCK=_BLOCK, num_warps=_NUM_WARPS,
            )  # fmt: skip

    FUSED = CrossEntropyPasses(_statistics_triton, _gradient_triton)


def cross_entropy_passes(dtype: torch.dtype, device: torch.device) -> CrossEntropyPasses:
    """Return the implementation for logits of ``dtype`` on ``device``: Triton kernels on GPUs, except for float64."""
    return PLAIN if FUSED is None or device.type != "cuda" or dtype == torch.float64 else FUSED
