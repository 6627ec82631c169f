"""The name by which existing programs import :mod:`megatron.core.attention.packed_seq_params`."""

from megatron.core.attention.packed_seq_params import *  # noqa: F403
