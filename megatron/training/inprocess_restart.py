"""Alias of :mod:`megatron.compat.inprocess_restart` for programs that import it by this name."""

from megatron.compat.inprocess_restart import *  # noqa: F403
