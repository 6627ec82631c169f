"""Flags of BERT. Only fields, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import PositiveInt


@dataclass(kw_only=True)
class BertConfig(OptionalGroup):
    """Sentence pairs and packed samples (pretrain_bert.py)"""

    HARMLESS: ClassVar[tuple[str, ...]] = ("bert_binary_head",)

    bert_binary_head: bool = flag("--bert-no-binary-head", default=True)
    """Train on pairs of texts, with the binary head for their order and token types (pretrain_bert.py)."""

    bert_num_tokentypes: PositiveInt | None = None
    """Token types with an embedding; default: 2 with the binary head, else none (pretrain_bert.py)."""


def num_tokentypes(group: BertConfig) -> int:
    """Return the rows of the token-type embedding; 0: none."""
    return group.bert_num_tokentypes or (2 if group.bert_binary_head else 0)
