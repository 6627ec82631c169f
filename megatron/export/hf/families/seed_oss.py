"""Seed-OSS (``seed_oss``)."""

from megatron.export.hf.attention_settings import Rope, groups
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Choice, FixedKeys, Same

SEED_OSS = Family(
    "seed_oss", "SeedOssForCausalLM", models="Seed-OSS-36B",
    config=(
        *llama.SIZES, llama.FFN, *llama.rms_norm(), llama.tied(False), llama.SILU_GATED, llama.NO_BIASES, groups(8),
        Same("kv_channels", "head_dim", default=128), Rope(),
        Choice("attention_bias", {value: {"add_qkv_bias": value} for value in (True, False)}, default=True),
        FixedKeys({"attention_out_bias": False, "mlp_bias": False}),
        Same("attention_dropout", "attention_dropout", default=0.1),
        Same("hidden_dropout", "residual_dropout", default=0.1), llama.NO_PADDING,
    ),
    weights=llama.WEIGHTS,
)  # fmt: skip
"""LLaMA with biases of queries, keys and values."""
