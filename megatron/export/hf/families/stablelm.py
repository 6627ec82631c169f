"""StableLM 3B and StableLM 2 1.6B (``stablelm``)."""

from megatron.export.hf.attention_settings import Rope, derived_head_size, groups
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Choice, Fixed, FixedKeys, Same

STABLELM = Family(
    "stablelm", "StableLmForCausalLM", models="StableLM 3B, StableLM 2 1.6B",
    config=(
        *llama.SIZES, llama.FFN, derived_head_size(), groups(32), Rope(share=0.25), llama.tied(False),
        llama.SILU_GATED, llama.NO_BIASES, Same("norm_epsilon", "layer_norm_eps", default=1e-5),
        Choice("use_qkv_bias", {value: {"add_qkv_bias": value} for value in (False, True)}, default=False),
        Same("attention_dropout", "attention_dropout", default=0.0),
        Same("hidden_dropout", "hidden_dropout", default=0.0),
        Fixed({"normalization": "LayerNorm"}),
        # StableLM 2 12B: a norm for each head, and one norm for both parallel branches
        FixedKeys({"qk_layernorm": False, "use_parallel_residual": False}),
    ),
    weights=llama.WEIGHTS,
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip
"""LLaMA with LayerNorm and a quarter of the channels rotated."""
