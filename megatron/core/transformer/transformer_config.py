"""The name by which existing programs import :mod:`megatron.core.config.transformer_config`."""

from megatron.core.config.transformer_config import *  # noqa: F403
