"""Flags of quantization-aware training, and the layers that are quantized. Only fields, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.core.config.optional import OptionalGroup

LINEAR = re.compile(r"(decoder|mtp)\.layers\.\d+\..*\.linear_\w+")
"""Names of the linear layers that are quantized: attention, feed-forward networks and experts."""


@dataclass(kw_only=True)
class QuantizationConfig(OptionalGroup):
    """Quantization-aware training"""

    TRANSFORM: ClassVar[str] = "megatron.core.models.quantization:quantization_transform"

    export_quant_cfg: Literal["fp8"] | None = None
    """Quantization-aware training: linear layers of transformer layers compute with weights and inputs rounded to fp8
    (e4m3), one scale per weight and per token. Gradients ignore the rounding."""
