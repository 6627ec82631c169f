"""Additional files of a Hugging Face folder to copy with its weights: selected by name; links out of the folder are
rejected. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from megatron.core.config.errors import UserError

CONFIG, GENERATION = "config.json", "generation_config.json"
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
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
    MORE_TEMPLATES,
    "tekken.json",
)
"""Names and patterns of tokenizer files. Others (weights, code, trainer state) would be invalid in another folder."""

PROCESSOR = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files of models of images and text."""

OF_DEFINITION = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    MORE_TEMPLATES,
    GENERATION,
)
"""Files that complete a tokenizer.json."""


def side_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the existing files of ``folder`` among ``names`` (also patterns). Raises UserError for a link out of it,
    whose target would be copied, except links of the hub's cache: ``snapshots/<revision>/<name>`` ->
    ``blobs/<hash>``."""
    paths = [path for name in names for path in (sorted(folder.glob(name)) if "*" in name else [folder / name])]
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    inside = _allowed_folders(Path(os.path.realpath(folder)))
    for path in files.values():
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(root) for root in inside):
            raise UserError(f"{path}: is a link out of its folder, to {target}; replace it with a copy of the file")
    return files


def is_tokenizer_file(name: str) -> bool:
    """Return whether ``name``, relative to a folder, is one of :data:`TOKENIZER`."""
    return any(fnmatchcase(name, pattern) for pattern in TOKENIZER)


def _allowed_folders(folder: Path) -> list[Path]:
    """A hub cache also has its blobs folder, unresolved so that a link named blobs allows nothing."""
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return [folder] if snapshots is None else [folder, snapshots.parent / "blobs"]
