"""The name by which existing programs import :mod:`megatron.compat.num_microbatches_calculator`."""

from megatron.compat.num_microbatches_calculator import *  # noqa: F403
