"""Alias of :mod:`megatron.training.run` for programs that import it by this name."""

from megatron.training.run import *  # noqa: F403
