"""Mistral (``MistralForCausalLM``): LLaMA with a sliding window."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family

FAMILY = Family(
    "mistral", "MistralForCausalLM",
    config=(*llama.common(), llama.FFN, llama.HEAD_SIZE, groups(8), Rope(), llama.NO_BIASES, Window(4096)),
    weights={**llama.AROUND, **llama.ATTENTION, **llama.FEED_FORWARD},
)  # fmt: skip
