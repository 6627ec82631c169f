"""Qwen2 and Qwen2.5 (``Qwen2ForCausalLM``): LLaMA with biases of queries, keys and values."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.settings import Ours

FAMILY = Family(
    "qwen2", "Qwen2ForCausalLM",
    config=(
        *llama.common(), llama.FFN, llama.HEAD_SIZE, groups(32), Rope(),
        Ours({"add_bias_linear": False, "add_qkv_bias": True}), Window(4096, switch=True, first="max_window_layers"),
    ),
    weights={**llama.AROUND, **llama.ATTENTION, **llama.FEED_FORWARD},
)  # fmt: skip
