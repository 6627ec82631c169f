"""The name by which existing programs import :mod:`megatron.training.checkpoint.checkpointer`."""

from megatron.training.checkpoint.checkpointer import *  # noqa: F403
