"""Layer specs of attention and a feed-forward network, built from a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.config.layer_kinds import BRANCHES, STANDARD
from megatron.core.enums import AttnMaskType
from megatron.core.models.backends import Backend
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec
from megatron.core.transformer.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.ssm.kimi_delta_attention import KimiDeltaAttention, KimiDeltaAttentionSubmodules
from megatron.core.transformer.ssm.mamba import MambaMixer
from megatron.core.transformer.ssm.mixer import MixerSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules


def _latent_attention(backend: Backend, qk_norm: Callable[..., object] | None, mask: AttnMaskType) -> ModuleSpec:
    """Return the spec of multi-latent attention, always causal: the backend's linears for up and output projections,
    replicated linears for the down projections, the library's core attention."""
    column = backend.column_parallel_linear
    slots = MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=ReplicatedLinear,
        linear_q_up_proj=column,
        linear_kv_down_proj=ReplicatedLinear,
        linear_kv_up_proj=column,
        core_attention=CoreAttention,
        linear_proj=backend.row_parallel_linear,
        q_layernorm=qk_norm,
        kv_layernorm=qk_norm,
        linear_qkv_down_proj=ReplicatedLinear,
        norm=backend.norm,
    )
    return ModuleSpec(MLASelfAttention, submodules=slots)


def _self_attention(backend: Backend, qk_norm: Callable[..., object] | None, mask: AttnMaskType) -> ModuleSpec:
    """Return the spec of self-attention with the backend's modules, and the mask type as a parameter."""
    slots = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear,
        core_attention=backend.core_attention,
        linear_proj=backend.row_parallel_linear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
        norm=backend.norm,
    )
    return ModuleSpec(SelfAttention, {"attn_mask_type": mask}, slots)


def _two_projections(kind: type, backend: Backend, qk_norm: object, mask: AttnMaskType) -> ModuleSpec:
    slots = MixerSubmodules(in_proj=backend.column_parallel_linear, out_proj=backend.row_parallel_linear)
    return ModuleSpec(kind, submodules=slots)


def _kimi_delta_attention(backend: Backend, qk_norm: Callable[..., object] | None, mask: AttnMaskType) -> ModuleSpec:
    column, row = backend.column_parallel_linear, backend.row_parallel_linear
    slots = KimiDeltaAttentionSubmodules(in_proj=column, out_proj=row, down=ReplicatedLinear, up=column)
    return ModuleSpec(KimiDeltaAttention, submodules=slots)


def _mlp(backend: Backend, qk_norm: Callable[..., object] | None, mask: AttnMaskType) -> ModuleSpec:
    return ModuleSpec(MLP, submodules=_linears(backend))


def _experts(backend: Backend, qk_norm: Callable[..., object] | None, mask: AttnMaskType) -> ModuleSpec:
    return ModuleSpec(MoELayer, submodules=MoESubmodules(shared_experts=_linears(backend)))


def _linears(backend: Backend) -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=backend.column_parallel_linear, linear_fc2=backend.row_parallel_linear)


MIXERS: dict[str, Callable[[Backend, Callable[..., object] | None, AttnMaskType], ModuleSpec]] = {
    "attention": _self_attention,
    "latent_attention": _latent_attention,
    "gated_delta_net": partial(_two_projections, GatedDeltaNet),
    "kimi_delta_attention": _kimi_delta_attention,
    "mamba": partial(_two_projections, MambaMixer),
    "mlp": _mlp,
    "experts": _experts,
}
"""Spec of each kind of mixer (``config/layer_kinds.py``)."""


def layer_spec(
    backend: Backend,
    kinds: Sequence[str] = STANDARD,
    *,
    mask: AttnMaskType = AttnMaskType.causal,
    qk_norm: Callable[..., object] | None = None,
) -> ModuleSpec:
    """Return the spec of one layer with a branch per kind. ``mask`` selects causal or bidirectional attention; other
    mixers are causal. ``qk_norm`` overrides the norms that the configuration gives queries and keys. The MLP's slots
    are also the shared expert's."""
    mixers = [MIXERS[kind](backend, qk_norm, mask) for kind in kinds]
    if len(mixers) == 2:
        return ModuleSpec(
            backend.layer, submodules=TransformerLayerSubmodules(backend.norm, mixers[0], backend.norm, mixers[1])
        )
    named = zip(mixers, (BRANCHES[kind] for kind in kinds))
    branches = [BranchSpec(names.name, mixer, backend.norm, names.norm, names.site) for mixer, names in named]
    return ModuleSpec(backend.layer, submodules=branches)


def encoder_spec(backend: Backend, num_layers: int) -> TransformerBlockSubmodules:
    """Return ``num_layers`` layers with bidirectional attention and the final norm."""
    return TransformerBlockSubmodules([layer_spec(backend, mask=AttnMaskType.padding)] * num_layers, backend.norm)
