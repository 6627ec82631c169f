"""Multi-token prediction. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.core.config.ranges import NonNegativeFloat, Range


@dataclass(kw_only=True)
class MTPConfig:
    """Multi-token prediction"""

    mtp_num_layers: Annotated[int, Range(1, 64)] | None = None
    """Predict so many further tokens at every position, each by a layer of its own behind the last one
    (DeepSeek-V3)."""

    mtp_use_repeated_layer: bool = False
    """One layer predicts all further tokens: applied once, the next one, applied to its own output, that behind it.
    Losses that balance experts weigh in it as much as in one layer."""

    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the mean of the losses of all further tokens, beside the main loss."""
