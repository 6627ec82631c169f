"""Merge attention outputs over two sets of keys by their log-sum-exp, in place.

    share = exp(block_lse) / (exp(block_lse) + exp(lse))
    out <- out + share (block_out - out),    lse <- log(exp(lse) + exp(block_lse))

Torch first widens the 16-bit block and then interpolates: twelve bytes of traffic per element more than this kernel's
single pass, and five launches instead of one.

Legend: b batch, a heads, q queries, d head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

_ROWS, _NUM_WARPS = 16, 4


def merge_attention_reference_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge in torch operations; ``out`` [..., d] and ``lse`` [...] may be views; lse is -inf before the first key."""
    share = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), share)
    lse.copy_(torch.logaddexp(lse, block_lse))


if triton is not None:

    @triton.jit
    def _merge_kernel(
        out, lse, block_out, block_lse, heads, queries,
        out_b, out_a, out_q, lse_b, lse_a, lse_q, block_b, block_a, block_q, block_lse_b, block_lse_a, block_lse_q,
        CHANNELS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """Merge ROWS queries of one head and batch row in place, in fp32. Strides are of batch, head and query dims."""
        head = (tl.program_id(1) % heads).to(tl.int64)
        row = (tl.program_id(1) // heads).to(tl.int64)
        query = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        channel = tl.arange(0, PADDED)
        inside_q = query < queries
        inside = inside_q[:, None] & (channel < CHANNELS)[None, :]
        lse_at = lse + row * lse_b + head * lse_a + query * lse_q
        block_lse_at = block_lse + row * block_lse_b + head * block_lse_a + query * block_lse_q
        out_at = out + row * out_b + head * out_a + query[:, None] * out_q + channel[None, :]
        block_at = block_out + row * block_b + head * block_a + query[:, None] * block_q + channel[None, :]
        before = tl.load(lse_at, mask=inside_q, other=0.0)
        new = tl.load(block_lse_at, mask=inside_q, other=0.0)
        largest = tl.maximum(before, new)
        weight, block_weight = tl.exp(before - largest), tl.exp(new - largest)
        total = weight + block_weight
        share = (block_weight / total)[:, None]
        so_far = tl.load(out_at, mask=inside, other=0.0)
        block = tl.load(block_at, mask=inside, other=0.0).to(tl.float32)
        tl.debug_barrier()  # many threads read a query's lse and one writes it: write only after all have read
        tl.store(out_at, so_far + share * (block - so_far), mask=inside)
        tl.store(lse_at, largest + tl.log(total), mask=inside_q)


def _merge_triton_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """``out`` and ``lse`` are fp32, ``block_out`` of any dtype; last dims are contiguous."""
    batch, heads, queries, channels = out.shape
    grid = (triton.cdiv(queries, _ROWS), batch * heads)
    _merge_kernel[grid](
        out, lse, block_out, block_lse, heads, queries, *out.stride()[:3], *lse.stride(), *block_out.stride()[:3],
        *block_lse.stride(), CHANNELS=channels, PADDED=triton.next_power_of_2(channels), ROWS=_ROWS,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def merge_attention_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge ``block_out`` (any float dtype) and ``block_lse`` of a further key block into ``out`` [b, a, q, d] and
    ``lse`` [b, a, q] (fp32 or fp64, any strides), in place. Two lse of -inf give NaN."""
    fits = out.is_cuda and out.dim() == 4 and out.dtype == torch.float32 and out.stride(-1) == block_out.stride(-1) == 1
    merge = _merge_triton_ if triton is not None and fits else merge_attention_reference_
    merge(out, lse, block_out, block_lse)
