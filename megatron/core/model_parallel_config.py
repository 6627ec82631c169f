"""The name by which existing programs import :mod:`megatron.core.config.model_parallel_config`."""

from megatron.core.config.model_parallel_config import *  # noqa: F403
