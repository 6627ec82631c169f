"""The name by which existing programs import :mod:`megatron.compat.core_utils`."""

from megatron.compat.core_utils import *  # noqa: F403
