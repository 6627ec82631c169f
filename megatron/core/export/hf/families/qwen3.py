"""Qwen3 (``Qwen3ForCausalLM``): LLaMA with normed queries and keys."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.settings import Ours, Same, Theirs

FAMILY = Family(
    "qwen3", "Qwen3ForCausalLM",
    config=(
        *llama.common(), llama.FFN, groups(32), Rope(), llama.NO_BIASES,
        Ours({"qk_layernorm": True}), Theirs({"attention_bias": False}),
        Same("kv_channels", "head_dim", default=128), Window(4096, switch=True, first="max_window_layers"),
    ),
    weights={**llama.AROUND, **llama.ATTENTION, **llama.FEED_FORWARD},
)  # fmt: skip
