"""OLMo 2 (``Olmo2ForCausalLM``): LLaMA with norms behind its branches, and queries and keys normed across heads."""

from megatron.core.export.hf.attention_settings import Rope, groups
from megatron.core.export.hf.families.gemma2 import WEIGHTS
from megatron.core.export.hf.families.llama import DROPOUT, FFN, HEAD_SIZE, NO_BIASES, SILU_GATED, SIZES, rms_norm, tied
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.settings import Ours, Theirs

FAMILY = Family(
    "olmo2", "Olmo2ForCausalLM",
    config=(
        *SIZES, FFN, HEAD_SIZE, groups(), *rms_norm(1e-5), *DROPOUT, tied(False), SILU_GATED, NO_BIASES, Rope(),
        Ours({"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True}),
        Theirs({"attention_bias": False}),
    ),
    weights=WEIGHTS,
)  # fmt: skip
