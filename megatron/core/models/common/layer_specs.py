"""Layer specs of attention and a feed-forward network, built from a backend."""

from __future__ import annotations

from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.models.backends import Backend
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.norm import L2Norm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules


def _l2_norm(config: TransformerConfig, hidden_size: int, eps: float, **kwargs: object) -> L2Norm:
    return L2Norm(eps)


def _latent_attention(backend: Backend, qk_layernorm: bool) -> ModuleSpec:
    """Return the spec of multi-latent attention: the backend's linears for up and output projections, replicated
    linears for the down projections, the library's core attention. Norms of the latents only with ``qk_layernorm``."""
    column, latent_norm = backend.column_parallel_linear, backend.norm if qk_layernorm else None
    slots = MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=ReplicatedLinear,
        linear_q_up_proj=column,
        linear_kv_down_proj=ReplicatedLinear,
        linear_kv_up_proj=column,
        core_attention=CoreAttention,
        linear_proj=backend.row_parallel_linear,
        q_layernorm=latent_norm,
        kv_layernorm=latent_norm,
        linear_qkv_down_proj=ReplicatedLinear,
    )
    return ModuleSpec(MLASelfAttention, submodules=slots)


def _self_attention(backend: Backend, qk_layernorm: bool, qk_l2_norm: bool, mask: AttnMaskType) -> ModuleSpec:
    """Return the spec of self-attention with the backend's linears and core attention, and the mask type as a
    parameter. Query and key get a norm per head: L2 norm with ``qk_l2_norm``, else the backend's norm with
    ``qk_layernorm``, else none."""
    head_norm = _l2_norm if qk_l2_norm else backend.norm if qk_layernorm else None
    slots = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear,
        core_attention=backend.core_attention,
        linear_proj=backend.row_parallel_linear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(SelfAttention, {"attn_mask_type": mask}, slots)


def layer_spec(
    backend: Backend, *, qk_layernorm: bool = False, qk_l2_norm: bool = False, multi_latent_attention: bool = False,
    experts: bool = False, mask: AttnMaskType = AttnMaskType.causal,
) -> ModuleSpec:  # fmt: skip
    """Return the spec of one layer, with a dense MLP or MoE (``experts``). ``mask`` selects causal or bidirectional
    attention. Latent attention (MLA) is always causal and ignores ``mask`` and ``qk_l2_norm``. The MLP's slots are also
    the shared expert's."""
    attention = _self_attention(backend, qk_layernorm, qk_l2_norm, mask)
    if multi_latent_attention:
        attention = _latent_attention(backend, qk_layernorm)
    linears = MLPSubmodules(linear_fc1=backend.column_parallel_linear, linear_fc2=backend.row_parallel_linear)
    mlp = ModuleSpec(MLP, submodules=linears)
    if experts:
        mlp = ModuleSpec(MoELayer, submodules=MoESubmodules(shared_experts=linears))
    return ModuleSpec(
        backend.layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=backend.norm,
            self_attention=attention,
            pre_mlp_layernorm=backend.norm,
            mlp=mlp,
        ),
    )


def encoder_spec(
    backend: Backend, num_layers: int, qk_layernorm: bool = False, qk_l2_norm: bool = False
) -> TransformerBlockSubmodules:  # fmt: skip
    """Return ``num_layers`` layers with bidirectional attention and the final norm."""
    layer = layer_spec(backend, qk_layernorm=qk_layernorm, qk_l2_norm=qk_l2_norm, mask=AttnMaskType.padding)
    return TransformerBlockSubmodules([layer] * num_layers, backend.norm)
