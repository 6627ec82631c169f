"""Layer specs of T5 models: those of BERT in the encoder; in the decoder those of GPT, with attention to the encoder's
output between self-attention and the feed-forward network."""

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
    """An encoder from torch alone."""
    return encoder_spec(get_backend("local"), num_layers)


def get_t5_decoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """A decoder from torch alone."""
    return _decoder(get_backend("local"), num_layers)


def get_t5_encoder_with_transformer_engine_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """An encoder of Transformer Engine modules; ValueError with the command that installs the package where it is
    missing."""
    return encoder_spec(get_backend("transformer_engine"), num_layers)


def get_t5_decoder_with_transformer_engine_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """A decoder of Transformer Engine modules; raises as the encoder's."""
    return _decoder(get_backend("transformer_engine"), num_layers)


def get_t5_block_specs(
    config: TransformerConfig, decoder_num_layers: int, *, relative_positions: bool = False,
    use_transformer_engine: bool = False,
) -> tuple[TransformerBlockSubmodules, TransformerBlockSubmodules]:  # fmt: skip
    """Encoder and decoder, as the configuration asks for them."""
    backend = get_backend("transformer_engine" if use_transformer_engine else "local")
    if relative_positions:
        backend = replace(backend, core_attention=partial(CoreAttention, attention_type="relative"))
    norms = config.qk_layernorm, config.qk_l2_norm
    return encoder_spec(backend, config.num_layers, *norms), _decoder(backend, decoder_num_layers, *norms)


def _decoder(
    backend: Backend, num_layers: int, qk_layernorm: bool = False, qk_l2_norm: bool = False
) -> TransformerBlockSubmodules:  # fmt: skip
    """Padding stands behind all tokens: causal attention hides it from them."""
    layer = layer_spec(backend, qk_layernorm=qk_layernorm, qk_l2_norm=qk_l2_norm)
    slots = CrossAttentionSubmodules(
        linear_q=backend.column_parallel_linear,
        linear_kv=backend.column_parallel_linear,
        core_attention=CoreAttention,
        linear_proj=backend.row_parallel_linear,
    )
    cross = BranchSpec(
        "cross_attention", ModuleSpec(CrossAttention, submodules=slots), backend.norm, "pre_cross_attn_layernorm",
        "cross attention",
    )  # fmt: skip
    attention, mlp = layer.submodules.branches
    return TransformerBlockSubmodules([replace(layer, submodules=(attention, cross, mlp))] * num_layers, backend.norm)
