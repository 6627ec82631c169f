"""The name by which existing programs import :mod:`megatron.training.run`."""

from megatron.training.run import *  # noqa: F403
