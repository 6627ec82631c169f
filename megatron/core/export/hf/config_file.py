"""Reads ``config.json`` and its like. Torch-free: a command line is made of it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.files import MAX_JSON, read_json
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.registry import family_of

CONFIG, GENERATION = "config.json", "generation_config.json"


def weight_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors; none where they cannot be told."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    with suppress(OSError, ValueError, RecursionError):
        if index.is_file():
            return {*read_json(index).get("weight_map", ())}
        with open(single, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return {*json.loads(file.read(min(length, MAX_JSON)))}
    return set()


def load_settings(folder: Path) -> tuple[Family, dict[str, Any]]:
    """The family of a folder, and the settings that its ``config.json`` says."""
    try:
        config = read_json(folder / CONFIG)
    except FileNotFoundError:
        raise UserError(f"{folder}: no folder of a Hugging Face model: {CONFIG} is missing") from None
    family = family_of(config)
    try:
        for key, name in family.counts_if_held.items():
            if config.get(key) and name.format(**config) not in weight_names(folder):
                del config[key]
        return family, family.load_settings(config)
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, UserError):
            raise UserError(f"{folder}: {error}") from None
        raise UserError(f"{folder / CONFIG}: a value is of a type that it cannot have ({error!r:.200})") from error
