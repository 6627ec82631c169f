"""The name by which existing programs import :mod:`megatron.compat.unavailable`."""

from megatron.compat.unavailable import get_gpt_heterogeneous_layer_spec  # noqa: F401
