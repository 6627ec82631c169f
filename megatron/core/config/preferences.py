"""Settings of training on preference pairs. Only fields, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import PositiveFloat, Range

REFERENCE = "reference"
"""Name of the reference model, and of its token losses in a batch."""


@dataclass(kw_only=True)
class PreferenceConfig(OptionalGroup):
    """Preference pairs (DPO)"""

    dpo: bool = False
    """Train on preference pairs (DPO): --data-path names JSON lines files with chosen and rejected completions. Both
    are documents of one row; --reset-position-ids and --reset-attention-mask follow."""

    dpo_loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of a pair: DPO, SLiC's hinge, or IPO, which has means over tokens in place of sums."""

    dpo_beta: PositiveFloat = 0.1
    """Strength of the reference model in --dpo."""

    dpo_label_smoothing: Annotated[float, Range(0, 0.5, below=True)] = 0.0
    """Probability that a preference is wrong (conservative DPO), with --dpo-loss sigmoid."""

    dpo_reference: Literal["model", "base", "stored"] | None = None
    """Reference of --dpo: a frozen model next to the trained one; the base of --lora-rank adapters, which needs no
    further weights; or its values, computed before training and stored next to the data. Default: base with
    --lora-rank, else model."""

    dpo_reference_load: str | None = None
    """Folder of the reference model: a --save directory or a Hugging Face folder. Default: the model that training
    starts from, --load-hf or --pretrained-checkpoint."""
