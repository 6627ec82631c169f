"""Which families there are, every :class:`Family` that a file of ``families/`` names, and which a folder is of.
Torch-free: a command line is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.files import MAX_JSON, read_json
from megatron.core.export.hf import families
from megatron.core.export.hf.family import Family

CONFIG, GENERATION = "config.json", "generation_config.json"


@cache
def known_families() -> dict[str, Family]:
    """``model_type`` -> family."""
    modules = [import_module(f"{families.__name__}.{each.name}") for each in iter_modules(families.__path__)]
    found = (each for module in modules for each in vars(module).values() if isinstance(each, Family))
    return {each.model_type: each for each in found}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a ``config.json``, by its model_type, or else by its architectures.

    Raises:
        UserError: none; with the list of those that there are.
    """
    table, kind, names = known_families(), config.get("model_type"), config.get("architectures") or []
    if isinstance(kind, str) and kind in table:
        if names and not {table[kind].architecture, *table[kind].also_read}.intersection(names):
            reason = f"{table[kind].architecture} is what can be converted"
            raise UserError(f"config.json: architectures is {names!r:.200}; of {kind}, {reason}")
        return table[kind]
    if kind is None:
        for family in table.values():
            if family.architecture in names:
                return family
    listed = ", ".join(sorted(table))
    raise UserError(f"config.json: model_type is {kind!r:.80}, which cannot be converted; known: {listed}")


def family_for(settings: Mapping[str, Any], preferred: str | None = None, *, only: str | None = None) -> Family:
    """The first family, ``preferred`` before all others, that has what completed ``settings`` say.

    Raises:
        UserError: none has, with a reason for each of this kind; or the family ``only`` has not, or is unknown.
    """
    table, reasons = known_families(), []
    if only is not None:
        if only not in table:
            raise UserError(f"{only}: no family that can be converted; known: {', '.join(sorted(table))}")
        table = {only: table[only]}
    else:
        table = {name: each for name, each in table.items() if each.model_family == settings["model_family"]}
    for name in sorted(table, key=lambda each: (each != preferred, each)):
        try:
            table[name].save_settings(settings)
            return table[name]
        except UserError as error:
            reasons.append(f"{name}: {error}")
    raise UserError(f"no family of Hugging Face's has a model of these settings: {'; '.join(reasons)}")


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
