"""The name by which existing programs import :mod:`megatron.compat.training_utils`."""

from megatron.compat.training_utils import *  # noqa: F403
