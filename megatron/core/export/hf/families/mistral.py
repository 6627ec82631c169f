"""Mistral (``MistralForCausalLM``): LLaMA with a sliding window."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families.llama import (
    AROUND,
    ATTENTION,
    COMMON,
    FEED_FORWARD,
    FFN,
    HEAD_SIZE,
    NO_BIASES,
)
from megatron.core.export.hf.family import Family

FAMILY = Family(
    "mistral", "MistralForCausalLM",
    config=(*COMMON, FFN, HEAD_SIZE, groups(8), Rope(), NO_BIASES, Window(4096)),
    weights={**AROUND, **ATTENTION, **FEED_FORWARD},
)  # fmt: skip
