"""8-bit floating point matrix products. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.ranges import Range


@dataclass(kw_only=True)
class Fp8Config:
    """8-bit floating point"""

    fp8: Literal["e4m3", "hybrid"] | None = flag("--fp8-format")
    """Run the linear layers in float8: e4m3 everywhere, or "hybrid": e4m3 forward and e5m2 for gradients."""

    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = "delayed"
    """How scales are found: from past maxima (delayed), per tensor, or per block of elements."""

    fp8_margin: Annotated[int, Range(0, 64)] = 0
    """Halve the scale this many times, as head room."""

    fp8_amax_history_len: Annotated[int, Range(1, 2**20)] = 1
    """Delayed scaling: steps whose maxima are remembered."""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Delayed scaling: which of the remembered maxima counts."""

    fp8_wgrad: bool = flag("--no-fp8-wgrad", "--disable-fp8-wgrad", default=True)
    """Compute weight gradients in higher precision although --fp8-format is on."""

    fp8_param_gather: bool = False
    """Keep and gather weights in float8. Needs --use-distributed-optimizer."""

    first_last_layers_bf16: bool = False
    """Keep the first and last layers in bfloat16."""

    num_layers_at_start_in_bf16: Annotated[int, Range(0, 2048)] = 1
    """First layers that --first-last-layers-bf16 keeps."""

    num_layers_at_end_in_bf16: Annotated[int, Range(0, 2048)] = 1
    """Last layers that --first-last-layers-bf16 keeps."""
