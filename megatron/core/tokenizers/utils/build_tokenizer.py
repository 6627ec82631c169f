"""The name by which existing programs import :mod:`megatron.core.tokenizers.build`."""

from megatron.core.tokenizers.build import build_tokenizer  # noqa: F401
