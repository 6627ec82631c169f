"""Layer specs of BERT models: GPT layers with bidirectional attention."""

from __future__ import annotations

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.models.backends import get_backend
from megatron.core.models.common.layer_specs import encoder_spec, layer_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def get_bert_layer_local_spec() -> ModuleSpec:
    """Return the spec of a layer that needs only torch."""
    return layer_spec(get_backend("local"), mask=AttnMaskType.padding)


def get_bert_layer_with_transformer_engine_spec() -> ModuleSpec:
    """Return the spec of a Transformer Engine layer. Without the package: local modules with its parameter names."""
    return layer_spec(get_backend("transformer_engine"), mask=AttnMaskType.padding)


_CONSTANTS = {
    "bert_layer_local_spec": get_bert_layer_local_spec,
    "bert_layer_with_transformer_engine_spec": get_bert_layer_with_transformer_engine_spec,
}


def __getattr__(name: str) -> ModuleSpec:
    """Return a new spec for each import of a constant such as ``bert_layer_local_spec``."""
    if name not in _CONSTANTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _CONSTANTS[name]()


def get_bert_block_spec(config: TransformerConfig, use_transformer_engine: bool = False) -> TransformerBlockSubmodules:
    """Return one spec per layer of the full model plus the final norm."""
    backend = get_backend("transformer_engine" if use_transformer_engine else "local")
    return encoder_spec(backend, config.num_layers)
