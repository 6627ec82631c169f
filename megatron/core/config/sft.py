"""Settings of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup


@dataclass(kw_only=True)
class FineTuningConfig(OptionalGroup):
    """Supervised fine-tuning"""

    sft: bool = False
    """Train on the answers of conversations: --data-path names JSON lines files, whose format is recognized by their
    keys. Each conversation is a document of a row; --reset-position-ids and --reset-attention-mask follow."""

    sft_packing: bool = flag("--no-sft-packing", default=True)
    """Pack conversations into rows of --seq-length tokens, instead of one conversation per row."""
