"""Import path of Megatron-LM for :mod:`megatron.core.config.transformer_config`."""

from megatron.core.config.transformer_config import *  # noqa: F403
