"""Reads ``config.json`` and its like. Torch-free: a command line is made of it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.files import read_regular_file
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.registry import family_of

CONFIG, GENERATION = "config.json", "generation_config.json"
MAX_JSON = 2**28


def read_config(folder: Path) -> dict[str, Any]:
    """The table in ``config.json``."""
    return read_json(folder / CONFIG)


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file of anybody's; ``UserError`` for anything else."""
    try:
        value = json.loads(read_regular_file(path, MAX_JSON, follow=True))
    except FileNotFoundError:
        raise UserError(f"{path.parent}: no folder of a Hugging Face model: {path.name} is missing") from None
    except CheckpointDamagedError as error:
        raise UserError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a table")
    return value


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
    config = read_config(folder)
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
