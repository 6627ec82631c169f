"""Layer specs of T5 models. The encoder uses BERT layers; the decoder uses GPT layers with cross-attention between
self-attention and the feed-forward network."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.backends import Backend, get_backend
from megatron.core.models.common.layer_specs import encoder_spec, layer_spec
from megatron.core.transformer.cross_attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def get_t5_encoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Return an encoder spec that needs only torch."""
    return encoder_spec(get_backend("local"), num_layers)


def get_t5_decoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Return a decoder spec that needs only torch."""
    return _decoder(get_backend("local"), num_layers)


def get_t5_encoder_with_transformer_engine_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Return an encoder spec of Transformer Engine modules, without it of local ones with its parameter names."""
    return encoder_spec(get_backend("transformer_engine"), num_layers)


def get_t5_decoder_with_transformer_engine_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Return a decoder spec of Transformer Engine modules. Without the package: local ones with its parameter names."""
    return _decoder(get_backend("transformer_engine"), num_layers)


def get_t5_block_specs(
    config: TransformerConfig,
    decoder_num_layers: int,
    *,
    relative_positions: bool = False,
    use_transformer_engine: bool = False,
) -> tuple[TransformerBlockSubmodules, TransformerBlockSubmodules]:
    """Return the encoder's and the decoder's spec. ``config`` gives the encoder's depth. ``relative_positions``:
    self-attention of both stacks adds a position bias and is local, also with Transformer Engine."""
    backend = get_backend("transformer_engine" if use_transformer_engine else "local")
    if relative_positions:
        backend = replace(backend, core_attention=partial(CoreAttention, attention_type="relative"))
    return encoder_spec(backend, config.num_layers), _decoder(backend, decoder_num_layers)


def _decoder(backend: Backend, num_layers: int) -> TransformerBlockSubmodules:
    """Return the decoder's spec: layers of causal self-attention, cross-attention with local core attention and without
    head norms, and feed-forward network. Attention is only causal, because padding follows all tokens."""
    layer = layer_spec(backend)
    slots = CrossAttentionSubmodules(
        linear_q=backend.column_parallel_linear,
        linear_kv=backend.column_parallel_linear,
        core_attention=CoreAttention,
        linear_proj=backend.row_parallel_linear,
    )
    cross = BranchSpec(
        "cross_attention",
        ModuleSpec(CrossAttention, submodules=slots),
        backend.norm,
        "pre_cross_attn_layernorm",
        "cross attention",
    )
    attention, mlp = layer.submodules.branches
    return TransformerBlockSubmodules([replace(layer, submodules=(attention, cross, mlp))] * num_layers, backend.norm)
