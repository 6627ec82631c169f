"""The name by which existing programs import :mod:`megatron.compat.legacy_model`."""

from megatron.compat.legacy_model import *  # noqa: F403
