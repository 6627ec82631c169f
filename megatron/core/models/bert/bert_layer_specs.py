"""Layer specs of BERT models: those of GPT, whose tokens see all others of their sample."""

from __future__ import annotations

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.models.backends import get_backend
from megatron.core.models.common.layer_specs import encoder_spec, layer_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def get_bert_layer_local_spec() -> ModuleSpec:
    """A layer from torch alone."""
    return layer_spec(get_backend("local"), mask=AttnMaskType.padding)


def get_bert_layer_with_transformer_engine_spec() -> ModuleSpec:
    """A layer of Transformer Engine modules; ValueError with the command that installs the package where it is
    missing."""
    return layer_spec(get_backend("transformer_engine"), mask=AttnMaskType.padding)


def get_bert_block_spec(config: TransformerConfig, use_transformer_engine: bool = False) -> TransformerBlockSubmodules:
    """One spec per layer of the whole model, and the final norm, as the configuration asks for them."""
    backend = get_backend("transformer_engine" if use_transformer_engine else "local")
    return encoder_spec(backend, config.num_layers, config.qk_layernorm, config.qk_l2_norm)
