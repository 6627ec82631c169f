"""Products of two fp8 matrices whose summed dim is contiguous in both, ``left [m, k] @ right [n, k]^T``.

On GPUs torch's ``_scaled_mm`` computes those with one scale per matrix, and cuBLASLt (``extensions/cublaslt.py``) those
with block scales and those that are added to gradients. Elsewhere the matrices are widened."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.extensions import cublaslt
from megatron.core.fusions.fp8_cast import BLOCK, Quantized, transpose_fp8


def dequantize(x: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``data * scale`` [m, k], computed in fp32 or ``dtype`` if that is wider, in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    data, scale = x.data.to(wide), x.scale.to(wide)
    if scale.dim() == 2:
        tall = scale.shape[0] != x.data.shape[0]  # 128 x 128 blocks
        scale = scale.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]
        scale = scale.repeat_interleave(BLOCK, 0)[: data.shape[0]] if tall else scale
    return (data * scale).to(dtype)


def has_blocks(x: Quantized) -> bool:
    """Return whether ``x`` has a scale per block."""
    return x.scale.dim() == 2


def transposed(x: Quantized) -> Quantized:
    """Return the transpose of a matrix with one scale or with 128 x 128 blocks."""
    return Quantized(transpose_fp8(x.data), x.scale.t().contiguous() if has_blocks(x) else x.scale)


def multiply(
    left: Quantized, right: Quantized, dtype: torch.dtype, *, fast: bool, bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``left`` [m, k] times ``right`` [n, k] transposed, plus ``bias`` [n], in ``dtype``; with ``out`` [m, n]
    written there, neither with a bias nor with blocks. ``fast``: GPUs may leave sums in the tensor cores' registers,
    which keep about 14 bits; never with blocks."""
    if not left.data.is_cuda or dtype == torch.float64:
        wide = torch.promote_types(dtype, torch.float32)
        product = (dequantize(left, wide) @ dequantize(right, wide).t()).to(dtype)
        if out is not None:
            return out.copy_(product)
        return product if bias is None else product + bias
    if has_blocks(left):
        product = _multiply_blocks(left, right, dtype)
        return product if bias is None else product + bias
    fused = bias if bias is not None and bias.dtype == dtype == torch.bfloat16 else None
    operands = left.data, right.data.t(), left.scale, right.scale
    if out is not None:
        return torch._scaled_mm(*operands, out_dtype=dtype, use_fast_accum=fast, out=out)
    product = torch._scaled_mm(*operands, bias=fused, out_dtype=dtype, use_fast_accum=fast)
    return product if bias is None or fused is not None else product + bias


def _multiply_blocks(left: Quantized, right: Quantized, dtype: torch.dtype) -> Tensor:
    product = torch.empty(left.data.shape[0], right.data.shape[0], dtype=dtype, device=left.data.device)
    if not _write(product, left, right, adds=False):
        raise RuntimeError(
            f"cuBLASLt cannot multiply {left.data.dtype} {[*left.data.shape]} by {right.data.dtype} "
            f"{[*right.data.shape]} with block scales; needs version 12.9 and a Hopper GPU"
        )
    return product


def _write(total: Tensor, left: Quantized, right: Quantized, *, adds: bool) -> bool:
    (scales, kind), (right_scales, right_kind) = _stored_scale(left), _stored_scale(right)
    return cublaslt.fp8_product(
        total, left.data, right.data, scales, right_scales, scales=(kind, right_kind), adds=adds, fast=False
    )


def _stored_scale(x: Quantized) -> tuple[Tensor, cublaslt.Scales]:
    if not has_blocks(x):
        return x.scale, "tensor"
    if x.scale.shape[0] == x.data.shape[0]:
        return x.scale, "rows"
    return F.pad(x.scale, (0, -x.scale.shape[1] % 4)).contiguous().t(), "squares"


def add_product(total: Tensor, left: Quantized, right: Quantized) -> None:
    """Add ``left`` [m, k] times ``right`` [n, k] transposed to ``total`` [m, n] in place. Sums are fp32. cuBLASLt
    rounds once to the dtype of ``total``, torch operations twice."""
    if not _write(total, left, right, adds=True):
        wide = torch.promote_types(total.dtype, torch.float32)
        total.add_(multiply(left, right, wide, fast=False))
