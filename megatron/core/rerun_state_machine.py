"""The name by which existing programs import :mod:`megatron.compat.rerun_state_machine`."""

from megatron.compat.rerun_state_machine import *  # noqa: F403
