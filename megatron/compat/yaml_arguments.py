"""The model's configuration where ``--yaml-cfg`` was given: settings are the same, wherever they come from."""

from __future__ import annotations

from megatron.core.config.transformer_config import TransformerConfig, config_from_settings


def core_transformer_config_from_yaml(args: object, transfomer_key: str = "language_model") -> TransformerConfig:
    """Call ``config_from_settings``; the key, which existing programs pass, has no effect."""
    return config_from_settings(args)
