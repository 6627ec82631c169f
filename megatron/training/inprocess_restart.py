"""The name by which existing programs import :mod:`megatron.compat.inprocess_restart`."""

from megatron.compat.inprocess_restart import *  # noqa: F403
