"""Export of a run's tokenizer to a Hugging Face folder: files with which ``AutoTokenizer`` returns the same ids, and
special token ids for ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.safe_files import MAX_TEXT_BYTES, read_file
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import DEFINITION, is_unnamed, with_copies
from megatron.core.tokenizers.huggingface import BackendTokenizer
from megatron.core.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron.export.hf.settings import Table

logger = logging.getLogger(__name__)
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
PIECES = "spiece.model"
T5_UNKNOWN = 2
"""Id of unknown pieces in ``transformers``' T5Tokenizer, which ignores the id in the model file."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that are always written, null if unknown: the defaults of ``transformers`` would be other ids."""


@dataclass(frozen=True)
class ExportedTokenizer:
    """Tokenizer files and special token ids for ``transformers``."""

    files: dict[str, bytes] = field(default_factory=dict)
    """Additional files, name -> content; empty if the files that are copied unchanged are sufficient."""
    ids: dict[str, int | list[int]] = field(default_factory=dict)
    """Key of config.json -> id(s), only for tokens that the tokenizer has."""


def export_tokenizer(settings: Table, assets: Mapping[str, Path], rows: int) -> ExportedTokenizer:
    """Export the tokenizer of the run's ``settings``.

    Returns an empty result if there is no tokenizer, or, with a logged warning, if it cannot be built.

    Args:
        assets: tokenizer files (``tokenizer/<name>``); take precedence over the paths in ``settings``.
        rows: rows of the word embedding; larger token ids are omitted."""
    tokenizer = _build(settings, assets)
    if tokenizer is None:
        return ExportedTokenizer()
    ids = _ids(tokenizer, settings["model_family"], rows)
    return ExportedTokenizer({} if DEFINITION in assets else _files(tokenizer, settings, assets), ids)


def _build(settings: Table, assets: Mapping[str, Path]) -> Tokenizer | None:
    """Files in the checkpoint win over their original paths. None, with a warning, if it cannot be built."""
    values = {field.name: settings[field.name] for field in fields(TokenizerConfig) if field.name in settings}
    cfg = with_copies(TokenizerConfig(**values), assets)
    if is_unnamed(cfg):
        logger.warning("no tokenizer is known: config.json names no end of text, at which generate() would stop")
        return None
    try:
        return build_tokenizer(cfg)
    except (UserError, OSError) as error:
        logger.warning("no tokenizer is exported: %s", error)
        return None


def _ids(tokenizer: Tokenizer, model_family: str, rows: int) -> dict[str, int | list[int]]:
    """Return {config.json key: token ID or IDs} below ``rows``. A decoder ends at every token that ends a text."""
    roles = {"bos_token_id": ["bos"], "eos_token_id": ["eos"], "pad_token_id": ["pad"]}
    if model_family == "bert":
        roles |= {"cls_token_id": ["cls"], "sep_token_id": ["sep"]}
    else:
        roles["decoder_start_token_id"] = ["bos" if "bos" in tokenizer.special_ids else "pad"]
    special = {
        key: [tokenizer.special_ids[role] for role in names if role in tokenizer.special_ids]
        for key, names in roles.items()
    }
    if model_family in ("gpt", "vlm"):
        special["eos_token_id"] = tokenizer.end_ids
    valid = {key: list(dict.fromkeys(token for token in ids if 0 <= token < rows)) for key, ids in special.items()}
    return {key: ids[0] if len(ids) == 1 else ids for key, ids in valid.items() if ids}


def _files(tokenizer: Tokenizer, settings: Table, assets: Mapping[str, Path]) -> dict[str, bytes]:
    """Return {file name: content} with which ``AutoTokenizer`` loads it. Empty, with a warning, for other types."""
    config: dict[str, object]
    if isinstance(tokenizer, BackendTokenizer):
        texts = tokenizer.inv_vocab
        roles = {f"{role}_token": texts[tokenizer.special_ids[role]] for role in ROLES if role in tokenizer.special_ids}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, "clean_up_tokenization_spaces": False}
        return {"tokenizer.json": tokenizer.definition.encode(), "tokenizer_config.json": _as_bytes(config)}
    is_t5 = settings.get("model_family") == "t5" and tokenizer.special_ids.get("unk") == T5_UNKNOWN
    if is_t5 and isinstance(tokenizer, SentencePieceTokenizer):
        flags = ("normalized", "lstrip", "rstrip", "single_word")
        attributes: dict[str, object] = {"special": True, **dict.fromkeys(flags, False)}
        added = {str(index): {"content": token, **attributes} for token, index in tokenizer.added.items()}
        config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "added_tokens_decoder": added}
        model = settings["tokenizer_model"]
        pieces = read_file(assets.get(f"tokenizer/{Path(model).name}", model), MAX_TEXT_BYTES)
        return {PIECES: pieces, "tokenizer_config.json": _as_bytes(config)}
    logger.warning("AutoTokenizer will not know the tokenizer: there is no such file for %s", tokenizer.tokenizer_type)
    return {}


def _as_bytes(config: dict[str, object]) -> bytes:
    return json.dumps(config, indent=2).encode() + b"\n"
