"""Additional files of a Hugging Face folder to copy with its weights: selected by name; links out of the folder are
rejected. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megatron.core.config.errors import UserError

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
)
"""Tokenizer files. Other files (weights, their index, code, trainer state) would be invalid in another folder."""

OF_DEFINITION = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
)
"""Files that complete a tokenizer.json."""


def side_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the existing files of ``folder`` among ``names``, by name.

    Raises:
        UserError: one is a link out of the folder, whose target would be copied into results. Links of the hub's cache
            are allowed: ``snapshots/<revision>/<name>`` -> ``blobs/<hash>`` of the same repository.
    """
    found = {name: folder / name for name in names if (folder / name).is_file()}
    inside = _allowed_folders(Path(os.path.realpath(folder)))
    for path in found.values():
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(each) for each in inside):
            raise UserError(f"{path}: is a link out of its folder, to {target}; replace it with a copy of the file")
    return found


def _allowed_folders(folder: Path) -> list[Path]:
    """Return ``folder`` and, in a hub cache, its blobs folder, unresolved so that a link named blobs allows nothing."""
    snapshots = next((each for each in folder.parents if each.name == "snapshots"), None)
    return [folder] if snapshots is None else [folder, snapshots.parent / "blobs"]
