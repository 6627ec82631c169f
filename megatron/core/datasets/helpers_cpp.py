"""The name by which existing programs import :mod:`megatron.compat.dataset_helpers`."""

from megatron.compat.dataset_helpers import *  # noqa: F403
