"""Alias of :mod:`megatron.compat.training_utils` for programs that import it by this name."""

from megatron.compat.training_utils import *  # noqa: F403
