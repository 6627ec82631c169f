"""Implementations of the modules that fill a layer spec: one frozen row each, and what a built model uses.

``local`` needs nothing beyond torch. ``transformer_engine`` needs the package of that name; asking for it where it is
missing says what to install. The attention kernel is a choice of its own (``attention/choose.py``), which
``local`` follows; Transformer Engine chooses among its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.sink import has_sink
from megatron.core.attention.window import layer_window
from megatron.core.config.errors import UserError, listed
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.extensions import transformer_engine as te
from megatron.core.extensions.apex import ApexNormalize, ApexWeightGradient
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelOutput
from megatron.core.transformer.norm import StreamNorm, make_norm
from megatron.core.transformer.recompute import recomputed_modules
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass(frozen=True)
class Backend:
    """One implementation's modules."""

    name: str
    column_parallel_linear: Callable[..., Any]
    row_parallel_linear: Callable[..., Any]
    norm: Callable[..., Any]
    core_attention: Callable[..., Any]
    layer: Callable[..., Any]


def transformer_engine_attention(
    config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType = AttnMaskType.causal,
    *, groups: ProcessGroups,
) -> nn.Module:  # fmt: skip
    """Transformer Engine's attention; that of ``local`` under context parallelism, where no kernel is wanted, with
    attention sinks, capped logits and attention dropout, of which the package draws masks that depend on the layout.

    Raises:
        UserError: variables that contradict ``attention_backend``.
    """
    own = config.context_parallel_size > 1 or config.attention_backend == "local" or has_sink(config)
    if own or config.attention_dropout or config.attn_logit_softcapping:
        return CoreAttention(config, layer_number, attn_mask_type, groups=groups)
    variables = te.kernel_variables(str(config.attention_backend), deterministic=config.deterministic_mode)
    for name, value in variables.items():
        if os.environ.setdefault(name, value) != value:
            raise UserError(
                f"--attention-backend {config.attention_backend} or --deterministic-mode: {name}={os.environ[name]} in "
                "the environment contradicts it; unset the variable"
            )
    window = layer_window(config.window_size, config.window_attn_skip_freq, layer_number)
    causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
    return te.TEDotProductAttention(config, layer_number, causal=causal, window=window, groups=groups)


class TransformerEngineLayer(TransformerLayer):
    """A layer whose norms are computed with the GEMMs behind them, where nothing else needs their outputs."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, layer_number: int = 1, *,
        groups: ProcessGroups, branches: range | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, submodules, layer_number, groups=groups, branches=branches)
        if "layernorm" in recomputed_modules(config):
            return
        for branch in self.branches:
            if branch.normed_is_residual:
                continue
            linear = getattr(branch.mixer, "first_linear", None)
            if not isinstance(branch.norm, te.TENorm) or not isinstance(linear, te.TEColumnParallelLinear):
                continue
            if linear.group.size == 1:
                linear.take_over(branch.norm)


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "local": Backend(
            "local", ColumnParallelLinear, RowParallelLinear, make_norm, CoreAttention, TransformerLayer
        ),
        te.NAME: Backend(
            te.NAME, te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm, transformer_engine_attention,
            TransformerEngineLayer,
        ),
    }
)  # fmt: skip


def get_backend(name: str) -> Backend:
    """The row called ``name``.

    Raises:
        ValueError: there is none (with the alternatives), or its package is missing (with the command that installs
            it).
    """
    if name not in BACKENDS:
        raise UserError(
            f"transformer_impl {name!r} is not available here; available: {', '.join(sorted(BACKENDS))}. "
            "Use --transformer-impl local"
        )
    if name == te.NAME and not te.transformer_engine_is_installed():
        raise te.missing_package()
    return BACKENDS[name]


def describe_choices(model_chunks: Iterable[nn.Module]) -> Iterator[str]:
    """Lines on what built models compute with: the modules that are there, not the settings that asked for them."""
    kinds: set[str] = set()
    attention: dict[str, list[int]] = {}
    others: dict[str, None] = {}
    for chunk in model_chunks:
        others |= dict.fromkeys(line for module in chunk.modules() for line in _descriptions_of_parts(module))
        for layer in (module for module in chunk.modules() if isinstance(module, TransformerLayer)):
            kinds |= {getattr(module, "implementation", "local") for module in layer.modules() if _has_weights(module)}
            for branch in layer.branches:
                if (core := getattr(branch.mixer, "core_attention", None)) is not None:
                    attention.setdefault(_words_of_attention(core), []).append(layer.layer_number)
    if kinds:
        yield f"layers: {', '.join(sorted(kinds))} (--transformer-impl)"
    for line, layers in attention.items():
        where = "" if len(attention) == 1 else f" in layer{'s' if len(layers) > 1 else ''} {listed(layers, most=8)}"
        yield f"attention: {line}{where}"
    yield from others


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _descriptions_of_parts(module: nn.Module) -> Iterator[str]:
    """Names kernels inside a module that another package computes."""
    if isinstance(module, StreamNorm):
        kernel: object = module.normalize
    elif isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelOutput):
        kernel = module.traits.accumulate
    else:
        return
    if isinstance(kernel, ApexNormalize | ApexWeightGradient):
        yield kernel.description


def _words_of_attention(core: nn.Module) -> str:
    if isinstance(core, CoreAttention):
        return core.description
    if isinstance(core, te.TEDotProductAttention):
        return "Transformer Engine, which chooses its kernel (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1 shows it)"
    return type(core).__name__
