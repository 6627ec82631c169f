"""Alias of :mod:`megatron.training.checkpoint.checkpointer` for programs that import it by this name."""

from megatron.training.checkpoint.checkpointer import *  # noqa: F403
