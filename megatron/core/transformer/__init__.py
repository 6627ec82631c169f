"""Transformer layers and their configuration."""

from megatron import serve_other_names
from megatron.core.config.transformer_config import MLATransformerConfig, TransformerConfig

__all__ = ["MLATransformerConfig", "TransformerConfig"]

serve_other_names(__name__)
