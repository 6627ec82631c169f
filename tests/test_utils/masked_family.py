"""BERT under another name: a family outside of ``megatron`` that ``tools/fill_mask.py`` serves."""

from dataclasses import replace

from megatron.core.models.bert.family import FAMILY as BERT
from megatron.core.models.family import Program

FAMILY = replace(BERT, name=__name__, programs=(Program("masked", "BERT under another name"),))
