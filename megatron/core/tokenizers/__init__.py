"""Text to ids and back: ``build_tokenizer(cfg)`` reads flags, ``MegatronTokenizer.from_pretrained`` a path."""

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import MegatronTokenizer, build_tokenizer

__all__ = ["MegatronTokenizer", "Tokenizer", "build_tokenizer"]
