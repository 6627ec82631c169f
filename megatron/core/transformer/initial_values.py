"""Initial distributions selected by the configuration.

Weights are normal with ``init_method_std``. For weights that write into the residual stream, whose variance grows with
every branch, the std is divided by the square root of their number, 2 per layer or 1 per symbol of a hybrid pattern
(GPT-2, section 2.3). With muP both are divided by the square root of the width multiplier, but not the std of
embeddings and of an output layer with separate weights."""

from __future__ import annotations

import math

from megatron.core.config.mup import width_multiplier
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.sharding.placement import Init, Normal, XavierUniform


def weight_init(config: TransformerConfig) -> Init:
    """Return the initial distribution of linear layers that read the residual stream."""
    if config.init_method_xavier_uniform:
        return XavierUniform()
    return Normal(config.init_method_std / math.sqrt(width_multiplier(config)))


def output_weight_init(config: TransformerConfig) -> Init:
    """Return the initial distribution of linear layers that write into the residual stream."""
    if config.init_method_xavier_uniform:
        return XavierUniform()
    per_layer = 1 if config.hybrid_layer_pattern else 2
    return Normal(config.init_method_std / math.sqrt(per_layer * config.num_layers * width_multiplier(config)))


def embedding_init(config: TransformerConfig) -> Init:
    """Return the initial distribution of embeddings: ``embedding_init_method_std`` if set, else :func:`weight_init`."""
    std = config.embedding_init_method_std
    if std is not None and (std != config.init_method_std or config.use_mup):
        return Normal(std)
    return weight_init(config)
