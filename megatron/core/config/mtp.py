"""Multi-token prediction. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import NonNegativeFloat, Range


@dataclass(kw_only=True)
class MTPConfig(OptionalGroup):
    """Multi-token prediction"""

    mtp_num_layers: Annotated[int, Range(1, 64)] | None = None
    """Number of multi-token prediction layers, one extra token each (DeepSeek-V3)."""

    mtp_use_repeated_layer: bool = False
    """Use one multi-token prediction layer repeatedly: its output for one token is its input for the next. Its
    balancing losses have the weight of one layer."""

    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the mean multi-token prediction loss, which is added to the main loss."""
