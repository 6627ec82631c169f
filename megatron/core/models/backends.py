"""Backends that fill the slots of a layer spec, and a summary of the kernels that a built model uses.

``local`` needs only torch. ``transformer_engine`` needs the package of that name; without it, local modules with its
parameter names are used and a notice says what to install. ``local`` selects its attention kernel in
``attention/choose.py``; Transformer Engine selects its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from torch import nn

from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.sink import has_sink
from megatron.core.attention.window import layer_window
from megatron.core.config.errors import UserError, listed
from megatron.core.config.model_rules import recomputed_modules
from megatron.core.config.notices import notice
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.extensions import transformer_engine as te
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.moved_parameters import MovableParameters, move_parameters
from megatron.core.tensor_parallel.grouped_linear import GroupedLinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.transformer_layer import TransformerLayer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """Module classes, or factories, of one layer implementation."""

    name: str
    column_parallel_linear: Callable[..., nn.Module]
    row_parallel_linear: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    core_attention: Callable[..., nn.Module]
    layer: Callable[..., nn.Module]


def transformer_engine_attention(
    config: TransformerConfig,
    layer_number: int,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
    *,
    groups: ProcessGroups,
) -> nn.Module:
    """Build Transformer Engine's attention and set its NVTE_* environment variables for ``config.attention_backend``;
    local :class:`CoreAttention` with context parallelism, backend ``local``, attention sinks, softcapped logits or
    attention dropout, whose masks in Transformer Engine depend on the layout. Raises UserError if an NVTE_* variable of
    the environment contradicts ``attention_backend`` or deterministic mode."""
    is_local = config.context_parallel_size > 1 or config.attention_backend == "local" or has_sink(config)
    if is_local or config.attention_dropout or config.attn_logit_softcapping:
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


_NORM_IN_LINEAR: Mapping[type, str] = {SelfAttention: "linear_qkv", MLP: "linear_fc1"}
"""Linear layer of each mixer into which Transformer Engine fuses the norm before the mixer."""
_INNER_NORMS: Mapping[type, Mapping[str, str]] = {
    MLASelfAttention: {"q_layernorm": "linear_q_up_proj", "kv_layernorm": "linear_kv_up_proj"}
}
"""Linear layers into which Transformer Engine fuses norms inside a mixer, by norm name."""


@cache
def _engine_class(kind: type) -> type:
    """A subclass with the name by which converters of other programs recognize a linear layer with a norm."""
    return type("TELayerNormColumnParallelLinear", (kind,), {"__module__": __name__})


class EngineNamedLayer(TransformerLayer):
    """Transformer layer with Transformer Engine's parameter names: a norm that Transformer Engine fuses into a linear
    layer appears as that layer's ``layer_norm_weight`` and ``layer_norm_bias``; expert weights have one name per
    expert (``named_slices``). Checkpoints keep the local names."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int = 1,
        *,
        groups: ProcessGroups,
        branches: range | None = None,
    ) -> None:
        """Build the layer and register the norms before SelfAttention's ``linear_qkv`` and MLP's ``linear_fc1``, and
        MLASelfAttention's latent norms, as ``layer_norm_weight`` and ``layer_norm_bias`` of the following linear.
        Subclasses of these mixers, other mixers and weightless norms keep their names; computation does not change."""
        super().__init__(config, submodules, layer_number, groups=groups, branches=branches)
        for module in self.modules():
            if isinstance(module, GroupedLinear):
                module.name_experts()
        for branch in self.branches:
            kind = type(branch.mixer)
            inner = _INNER_NORMS.get(kind, {}).items()
            norms = {f"{branch.name}.{norm}": linear for norm, linear in inner if hasattr(branch.mixer, norm)}
            if kind in _NORM_IN_LINEAR:
                norms[branch.norm_name] = _NORM_IN_LINEAR[kind]
            for norm, linear in norms.items():
                if isinstance(self.get_submodule(norm), MovableParameters):
                    move_parameters(self, norm, f"{branch.name}.{linear}", "layer_norm_")
                    module = branch.mixer.get_submodule(linear)
                    module.__class__ = _engine_class(type(module))  # type: ignore[arg-type]  # classes are hashable


class TransformerEngineLayer(EngineNamedLayer):
    """Layer that fuses each norm into the next column-parallel GEMM. The norm stays separate with norm recomputation,
    with tensor parallelism, or if the normalized stream is also the residual."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int = 1,
        *,
        groups: ProcessGroups,
        branches: range | None = None,
    ) -> None:
        """Build the layer; each branch's first column-parallel linear of a known class adopts its norm."""
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
                linear.adopt_norm(branch.norm)


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "local": Backend("local", ColumnParallelLinear, RowParallelLinear, build_norm, CoreAttention, TransformerLayer),
        te.NAME: Backend(
            te.NAME,
            te.TEColumnParallelLinear,
            te.TERowParallelLinear,
            te.TENorm,
            transformer_engine_attention,
            TransformerEngineLayer,
        ),
    }
)


@cache
def _local_with_engine_names() -> Backend:
    notice(logger, "%s is not installed (%s); using local layers with its parameter names", te.NAME, te.INSTALL)
    return replace(BACKENDS["local"], layer=EngineNamedLayer)


def get_backend(name: str) -> Backend:
    """Return the backend ``name``. If Transformer Engine is not installed, ``transformer_engine`` returns local modules
    with its parameter names, and logs a notice the first time. Raises UserError for an unknown name."""
    if name not in BACKENDS:
        raise UserError(
            f"transformer_impl {name!r} is not available here; available: {', '.join(sorted(BACKENDS))}. "
            "Use --transformer-impl local"
        )
    if name == te.NAME and not te.transformer_engine_is_installed():
        return _local_with_engine_names()
    return BACKENDS[name]


def kernel_summary(model_chunks: Iterable[nn.Module]) -> Iterator[str]:
    """Yield log lines about the implementations that the built modules of ``model_chunks`` use: one of layer backends,
    then one per attention kernel, with its layer numbers if there are several."""
    kinds: set[str] = set()
    attention: dict[str, list[int]] = {}
    for chunk in model_chunks:
        for layer in (module for module in chunk.modules() if isinstance(module, TransformerLayer)):
            kinds |= {getattr(module, "implementation", "local") for module in layer.modules() if _has_weights(module)}
            for branch in layer.branches:
                if (core := getattr(branch.mixer, "core_attention", None)) is not None:
                    attention.setdefault(_attention_summary(core), []).append(layer.layer_number)
    if kinds:
        yield f"layers: {', '.join(sorted(kinds))} (--transformer-impl)"
    for line, layers in attention.items():
        where = "" if len(attention) == 1 else f" in layer{'s' if len(layers) > 1 else ''} {listed(layers, most=8)}"
        yield f"attention: {line}{where}"


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _attention_summary(core: nn.Module) -> str:
    if isinstance(core, CoreAttention):
        return core.description
    if isinstance(core, te.TEDotProductAttention):
        return "Transformer Engine, which chooses its kernel (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1 shows it)"
    return type(core).__name__
