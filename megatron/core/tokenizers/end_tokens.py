"""Tokens that end a model's text, by the files of its Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.safe_files import MAX_TEXT_BYTES, parse_json, read_file

FILES = ("generation_config.json", "config.json")


def read_end_ids(folder: str | os.PathLike) -> list[int]:
    """Return the ids of ``eos_token_id`` (an id or a list) in generation_config.json and config.json of ``folder``,
    each once; empty without such files or keys. Raises UserError for a damaged file and other values."""
    ids: list[int] = []
    for path in (Path(folder) / name for name in FILES):
        if not path.is_file():
            continue
        try:
            value = parse_json(read_file(path, MAX_TEXT_BYTES).decode()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: cannot be read as a JSON object ({error})") from None
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(index) is int for index in values):
            raise UserError(f"{path}: eos_token_id is {value!r:.100}; it must be an id or a list of ids")
        ids += [index for index in values if index >= 0]
    return list(dict.fromkeys(ids))
