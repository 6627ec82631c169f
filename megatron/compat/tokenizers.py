"""Tokenizers of programs that hold only some of the tokenizer's arguments."""

from __future__ import annotations

from dataclasses import fields

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers import build
from megatron.core.tokenizers.base import Tokenizer


def build_tokenizer(args: object) -> Tokenizer:
    """Build the tokenizer that the attributes of ``args`` name; missing ones have the defaults of the flags. Raises
    UserError as :func:`megatron.core.tokenizers.build.build_tokenizer`."""
    names = [field.name for field in fields(TokenizerConfig)]
    return build.build_tokenizer(
        TokenizerConfig(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    )
