"""Gemma (``GemmaForCausalLM``): LLaMA with wide heads, scaled embeddings, GeGLU, and norms stored minus one."""

from megatron.core.export.hf.attention_settings import Rope, groups
from megatron.core.export.hf.families.llama import (
    AROUND,
    ATTENTION,
    DROPOUT,
    FEED_FORWARD,
    FFN,
    NO_BIASES,
    SIZES,
    rms_norm,
    tied,
)
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.settings import Choice, Ours, Rule, Same, Theirs

COMMON: tuple[Rule, ...] = (
    *SIZES, FFN, *rms_norm(), *DROPOUT, tied(True), NO_BIASES, Same("kv_channels", "head_dim", default=256),
    Ours({"apply_layernorm_1p": True, "apply_embedding_scaling": True}),
    Theirs({"attention_bias": False, "use_bidirectional_attention": False}),
)  # fmt: skip
GEGLU = {"gelu_pytorch_tanh": {"geglu": True}}

FAMILY = Family(
    "gemma", "GemmaForCausalLM",
    config=(
        *COMMON, groups(16), Rope(), Theirs({"hidden_activation": "gelu_pytorch_tanh"}),
        Choice("hidden_act", {**GEGLU, "gelu": {"geglu": True}}, default="gelu_pytorch_tanh"),  # both mean the former
    ),
    weights={**AROUND, **ATTENTION, **FEED_FORWARD},
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip
