"""The name by which existing programs import :mod:`megatron.core.schedules.learning_rate`."""

from megatron.core.schedules.learning_rate import *  # noqa: F403
