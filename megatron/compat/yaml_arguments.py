"""The model's configuration where ``--yaml-cfg`` was given: settings are the same, wherever they come from."""

from __future__ import annotations

from typing import Any

from megatron.core.config.transformer_config import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args


def core_transformer_config_from_yaml(args: Any, transfomer_key: str = "language_model") -> TransformerConfig:
    """Call ``core_transformer_config_from_args``; the key, which existing programs pass, has no effect."""
    return core_transformer_config_from_args(args)
