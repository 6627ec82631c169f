"""Who provides the modules that fill a layer spec: one frozen row per implementation.

``local`` needs nothing beyond torch. Rows of optional packages are added where the package is available; asking for one
that is not says what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import make_core_attention
from megatron.core.transformer.norm import make_norm


@dataclass(frozen=True)
class Backend:
    """One implementation's modules."""

    name: str
    column_parallel_linear: Callable[..., Any]
    row_parallel_linear: Callable[..., Any]
    norm: Callable[..., Any]
    core_attention: Callable[..., Any]


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {"local": Backend("local", ColumnParallelLinear, RowParallelLinear, make_norm, make_core_attention)}
)


def get_backend(name: str) -> Backend:
    """The row called ``name``; ValueError with the alternatives where there is none."""
    if name not in BACKENDS:
        raise ValueError(
            f"transformer_impl {name!r} is not available here; available: {', '.join(sorted(BACKENDS))}. "
            "Use --transformer-impl local"
        )
    return BACKENDS[name]
