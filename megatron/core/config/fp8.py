"""Flags of fp8 training. Only fields, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import PositiveInt, Range

if TYPE_CHECKING:
    from megatron.core.config.model_settings import ModelSettings

BLOCK = 128
"""Side of a block of ``--fp8-recipe blockwise``; rows of every fp8 matrix are a multiple of it there."""
ALIGNED = 16
"""Divisor of the sizes of every other fp8 matrix."""
EXPERT_WIDTH = 6144
"""Least ``moe_ffn_hidden_size`` of experts in fp8: GEMMs of narrower ones save less time than casts and launches take.
Layers of width 14336 are 63 % faster than in bf16, of width 2048 23 % slower (benchmarks/results/fp8_experts.json)."""


@dataclass(kw_only=True)
class Fp8Config(FlagGroup):
    """fp8"""

    fp8: Literal["e4m3", "hybrid"] | None = flag("--fp8-format", default=None)
    """Compute the linear layers of transformer layers in fp8: ``e4m3`` for all matrices, or ``hybrid`` with e5m2 for
    gradients. Embedding, output layer, routers, norms, attention and narrow experts keep the model's dtype. On a CPU
    fp8 is emulated."""

    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = "delayed"
    """Scales: one per matrix, from earlier steps (delayed) or from its values (tensorwise); or one per block, 128
    elements of activations and 128 x 128 of weights (blockwise)."""

    fp8_margin: Annotated[int, Range(0, 64)] = 0
    """--fp8-recipe delayed: divide scales by 2 to this power."""

    fp8_amax_history_len: PositiveInt = 1
    """--fp8-recipe delayed: steps whose largest magnitudes are kept."""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """--fp8-recipe delayed: scale by the magnitude of the last step or by the maximum of the history."""

    fp8_wgrad: bool = flag("--no-fp8-wgrad", "--disable-fp8-wgrad", default=True)
    """Compute weight gradients in fp8 too."""

    fp8_weight_transpose_cache: bool = flag("--no-fp8-weight-transpose-cache", default=True)
    """Keep transposed fp8 copies of weights for a step, 1 byte per weight. Otherwise the backward pass of each
    micro-batch makes them again, with the same results."""

    fp8_param_gather: bool = False
    """All-gather fp8 copies of updated weights over data-parallel ranks: half of the bytes, the same results. Requires
    --use-distributed-optimizer or --use-torch-fsdp2."""

    first_last_layers_bf16: bool = False
    """Keep the first and last layers in the model's dtype."""

    num_layers_at_start_in_bf16: Annotated[int, Range(0, 2**31 - 1)] = 1
    """--first-last-layers-bf16: number of first layers."""

    num_layers_at_end_in_bf16: Annotated[int, Range(0, 2**31 - 1)] = 1
    """--first-last-layers-bf16: number of last layers."""


def notes_amax(config: Fp8Config) -> bool:
    """Return whether kernels note the largest magnitude of their results, from which casts compute scales. With delayed
    scaling casts know the scale and find the magnitude themselves."""
    return config.fp8 is not None and config.fp8_recipe == "tensorwise"


def experts_in_fp8(config: ModelSettings) -> bool:
    """Return whether experts compute in fp8: wide ones, with one scale per matrix."""
    if config.fp8 is None or config.num_moe_experts is None:
        return False
    return config.fp8_recipe != "blockwise" and (config.moe_ffn_hidden_size or 0) >= EXPERT_WIDTH
