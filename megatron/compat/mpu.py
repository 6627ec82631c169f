"""``megatron.compat.mpu``: the older name of ``megatron.core.parallel_state``, which existing programs import."""

from megatron.core.parallel_state import *  # noqa: F403
