"""Rounding to fp8 (e4m3) with scales that divide, as in stored quantized weights: q = e4m3(x / s), value = s q. Torch
operations; ``fp8_cast.py`` has the kernels of fp8 GEMMs, whose factors multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.fp8_cast import E4M3, LARGEST

TINY = torch.finfo(torch.float32).tiny


def scales(amax: Tensor) -> Tensor:
    """Return the fp32 scales amax / 448 of the largest magnitudes ``amax``; 1 where it is 0, infinite or NaN."""
    quotient = amax.float() / torch.full_like(amax, LARGEST[E4M3], dtype=torch.float32)  # not times a rounded 1 / 448
    return torch.where(quotient.isfinite() & (quotient > 0), quotient.clamp(min=TINY), 1.0)


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` / ``scale`` in e4m3, clipped to its range; NaN for infinities and NaN."""
    x = x.float()
    return ((x / scale).clamp(-LARGEST[E4M3], LARGEST[E4M3]) + (x - x)).to(E4M3)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` with the values that fp8 has with ``scale`` (fp32, broadcast), in the dtype of ``x``."""
    return (to_e4m3(x, scale).float() * scale).to(x.dtype)
