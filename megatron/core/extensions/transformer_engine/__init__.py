"""NVIDIA's Transformer Engine: its modules in our slots. Above this package's neighbours, which know no layers."""

from megatron.core.extensions.transformer_engine.modules import (
    NAME,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TENorm,
    TERowParallelLinear,
    kernel_variables,
    load_transformer_engine,
    missing_package,
    transformer_engine_is_installed,
)  # fmt: skip

__all__ = [
    "NAME", "TEColumnParallelLinear", "TEDotProductAttention", "TENorm", "TERowParallelLinear", "kernel_variables",
    "load_transformer_engine", "missing_package", "transformer_engine_is_installed",
]  # fmt: skip
