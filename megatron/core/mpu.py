"""The name by which existing programs import :mod:`megatron.compat.mpu`."""

from megatron.compat.mpu import *  # noqa: F403
