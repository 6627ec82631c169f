"""The name by which existing programs import :mod:`megatron.compat.unavailable`."""

from megatron.compat.unavailable import *  # noqa: F403
