"""NVIDIA's Transformer Engine in place of local modules. A layer above the other extensions, which import no model
layers."""

from megatron import serve_other_names
from megatron.core.extensions.transformer_engine.modules import (
    INSTALL,
    NAME,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TENorm,
    TERowParallelLinear,
    kernel_variables,
    load_transformer_engine,
    missing_package,
    transformer_engine_is_installed,
)

__all__ = [
    "INSTALL",
    "NAME",
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TENorm",
    "TERowParallelLinear",
    "kernel_variables",
    "load_transformer_engine",
    "missing_package",
    "transformer_engine_is_installed",
]

serve_other_names(__name__)
