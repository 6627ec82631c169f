"""ERNIE 4.5, dense (``ernie4_5``)."""

from megatron.export.hf.attention_settings import Rope, groups
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Begin, Fixed, Ignored, Same

ERNIE4_5 = Family(
    "ernie4_5", "Ernie4_5ForCausalLM", models="ERNIE 4.5 0.3B",
    config=(
        *llama.SIZES, llama.FFN, *llama.rms_norm(1e-5), llama.tied(True), llama.SILU_GATED, groups(2),
        Same("kv_channels", "head_dim", default=128), Rope(500000.0),
        Same("add_bias_linear", "use_bias", default=False), Fixed({"rotary_interleaved": True}),
        Begin({"attention_dropout": 0.0, "hidden_dropout": 0.0}),
        Ignored(("compression_ratio", "fuse_rope", "weight_share_add_bias", "use_flash_attention")),
    ),
    weights=llama.WEIGHTS,
)  # fmt: skip
"""LLaMA that rotates neighboring channels."""
