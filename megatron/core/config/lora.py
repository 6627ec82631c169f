"""Flags of low-rank adapters. Only fields, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import PositiveFloat, PositiveInt, Probability


@dataclass(kw_only=True)
class LoraConfig(OptionalGroup):
    """Low-rank adapters (LoRA)"""

    TRANSFORM: ClassVar[str] = "megatron.core.models.adapters.transform:lora_transform"

    lora_rank: PositiveInt | None = None
    """Train low-rank adapters of this rank (LoRA) on linear layers of the frozen model of --load-hf or
    --pretrained-checkpoint. Checkpoints contain the adapters only."""

    lora_alpha: PositiveFloat | None = None
    """Scale of the adapters' outputs times --lora-rank (or its root, --lora-use-rslora). Default: --lora-rank."""

    lora_target_modules: list[str] | None = None
    """Linear layers with adapters: names (linear_qkv) or patterns of full names (*.layers.0.*.linear_fc1); default: all
    linear layers of attention, linear attention, Mamba-2 and feed-forward networks, but no routed experts
    (experts.linear_fc1), none of a vision tower (vision.*), and no output projection of Mamba-2 (mixer.out_proj)."""

    lora_use_rslora: bool = False
    """Divide --lora-alpha by the square root of the rank (rsLoRA)."""

    lora_use_dora: bool = False
    """Train the norm of each row of the adapted weights (DoRA)."""

    lora_dropout: Probability = 0.0
    """Dropout probability of the adapters' inputs in training."""


SETTINGS = ("lora_rank", "lora_alpha", "lora_target_modules", "lora_use_rslora", "lora_use_dora")
