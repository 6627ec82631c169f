"""Files by which ``AutoTokenizer`` gives the ids that a run's own tokenizer gave, of the kinds that have such files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.huggingface import BackendTokenizer
from megatron.core.tokenizers.sentence_piece import SentencePieceTokenizer

logger = logging.getLogger(__name__)
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
PIECES = "spiece.model"
T5_UNKNOWN = 2
"""The id that ``transformers``' T5Tokenizer has for unknown pieces, whatever the model says."""


def tokenizer_files(settings: Mapping[str, Any], assets: Mapping[str, Path]) -> dict[str, bytes]:
    """Name -> content, beside the files that go along as they are; nothing where these are enough, or where there is
    no such tokenizer, which is logged.

    Args:
        settings: of the run; its tokenizer's files are among ``assets`` (``tokenizer/<name>``), by their names.
    """
    if "tokenizer/tokenizer.json" in assets or settings.get("tokenizer_type") in (None, "NullTokenizer"):
        return {}
    values = {field.name: settings[field.name] for field in fields(TokenizerConfig) if field.name in settings}
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        if values.get(name):
            values[name] = str(assets.get(f"tokenizer/{Path(values[name]).name}", values[name]))
    try:
        tokenizer = build_tokenizer(TokenizerConfig(**values))
    except (UserError, OSError) as error:
        logger.warning("no tokenizer goes along: %s", error)
        return {}
    config: dict[str, Any]
    if isinstance(tokenizer, BackendTokenizer):
        texts = tokenizer.inv_vocab
        roles = {f"{role}_token": texts[tokenizer.special_ids[role]] for role in ROLES if role in tokenizer.special_ids}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, "clean_up_tokenization_spaces": False}
        return {"tokenizer.json": tokenizer.definition.encode(), "tokenizer_config.json": _as_bytes(config)}
    is_t5 = settings.get("model_family") == "t5" and tokenizer.special_ids.get("unk") == T5_UNKNOWN
    if is_t5 and isinstance(tokenizer, SentencePieceTokenizer):
        flags = ("normalized", "lstrip", "rstrip", "single_word")
        kept: dict[str, Any] = {"special": True, **dict.fromkeys(flags, False)}
        added = {str(index): {"content": token, **kept} for token, index in tokenizer.added.items()}
        config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "added_tokens_decoder": added}
        return {PIECES: Path(values["tokenizer_model"]).read_bytes(), "tokenizer_config.json": _as_bytes(config)}
    logger.warning("AutoTokenizer will not know the tokenizer: there is no such file for %s", tokenizer.tokenizer_type)
    return {}


def _as_bytes(config: dict[str, Any]) -> bytes:
    return json.dumps(config, indent=2).encode() + b"\n"
