"""The name by which existing programs import :mod:`megatron.core.attention.dot_product_attention`."""

from megatron.core.attention.dot_product_attention import *  # noqa: F403
