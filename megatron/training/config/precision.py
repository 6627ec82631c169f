"""Loss scaling, accumulation and reduction formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.core.config.ranges import PositiveFloat, Range


@dataclass(kw_only=True)
class MixedPrecisionConfig:
    """Mixed precision"""

    loss_scale: PositiveFloat | None = None
    """Constant loss scale; left out, --fp16 adapts it."""

    initial_loss_scale: PositiveFloat = 2**32
    """Dynamic loss scale at the start."""

    min_loss_scale: PositiveFloat = 1.0
    """Lower bound of the dynamic loss scale."""

    loss_scale_window: Annotated[float, Range(1)] = 1000
    """Clean iterations after which the dynamic loss scale doubles."""

    hysteresis: Annotated[int, Range(1, 2**20)] = 2
    """Overflows that the dynamic loss scale tolerates before it halves."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in float32; on by itself with --bf16 unless --grad-reduce-in-bf16 is given."""

    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bfloat16: half the memory and traffic, coarser sums."""
