"""Which words are masked in the samples of BERT and T5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.core.config.ranges import Range


@dataclass(kw_only=True)
class MaskedDataConfig:
    """Masked words"""

    mask_prob: Annotated[float, Range(0, 1, above=True, below=True)] = 0.15
    """Share of a sample's tokens that are masked (pretrain_bert.py) or replaced by sentinels (pretrain_t5.py)."""

    short_seq_prob: Annotated[float, Range(0, 1)] = 0.1
    """Share of samples that are made shorter than they could be (pretrain_bert.py, pretrain_t5.py)."""

    use_packed_sequence: bool = False
    """Lay the samples of a micro-batch end to end in one row, without padding; attention keeps them apart
    (pretrain_bert.py)."""
