"""Transformer layers and their configuration."""

from megatron.core.config.transformer_config import MLATransformerConfig, TransformerConfig

__all__ = ["MLATransformerConfig", "TransformerConfig"]
