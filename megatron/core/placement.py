"""The name by which existing programs import :mod:`megatron.core.sharding.placement`."""

from megatron.core.sharding.placement import *  # noqa: F403
