"""Qwen3 (``Qwen3ForCausalLM``): LLaMA with normed queries and keys."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families.llama import (
    AROUND,
    ATTENTION,
    COMMON,
    FEED_FORWARD,
    FFN,
    NO_BIASES,
)
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.settings import Ours, Same, Theirs

FAMILY = Family(
    "qwen3", "Qwen3ForCausalLM",
    config=(
        *COMMON, FFN, groups(32), Rope(), NO_BIASES, Ours({"qk_layernorm": True}), Theirs({"attention_bias": False}),
        Same("kv_channels", "head_dim", default=128), Window(4096, switch=True, first="max_window_layers"),
    ),
    weights={**AROUND, **ATTENTION, **FEED_FORWARD},
)  # fmt: skip
