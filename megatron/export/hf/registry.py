"""Registry of model families: every :class:`Family` in the modules of ``families/``, and lookup for a folder or for
settings. Torch-free, because command-line parsing uses it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from megatron.core.config.errors import UserError, folder_fix
from megatron.core.dist_checkpointing.files import read_json
from megatron.export.hf import families
from megatron.export.hf.family import Family
from megatron.export.hf.image_processor import read_image_settings
from megatron.export.hf.quantization import KEY, weight_format
from megatron.export.hf.settings import Table
from megatron.export.hf.side_files import CONFIG
from megatron.export.safetensors_header import read_header

KEYS_OF_TRANSFORMERS = Path(__file__).with_name("transformers_keys.json")
"""Keys of config.json that ``transformers`` reads, by architecture; written by tools/transformers_keys.py."""
NEAREST = 3
"""Number of closest families whose differences an error lists."""
COMMON = ("llama", "t5")
"""Families that other programs know best: chosen before others that can represent the same model."""
KINDS = ("multi_latent_attention", "num_moe_experts", "position_embedding_type")
"""Settings that make a family distant from a model if they differ, regardless of other differences."""


@cache
def known_families() -> dict[str, Family]:
    """Return all families by ``model_type``; imports the modules of ``families/``."""
    modules = [import_module(f"{families.__name__}.{member.name}") for member in iter_modules(families.__path__)]
    members = (member for module in modules for member in vars(module).values() if isinstance(member, Family))
    return {member.model_type: member for member in members}


@cache
def keys_of_transformers(architecture: str) -> frozenset[str]:
    """Return the names that the code of ``transformers`` may read from the ``config.json`` of ``architecture``."""
    table = read_json(KEYS_OF_TRANSFORMERS)
    return frozenset((*table["shared"], *table[architecture]))


def read_config(path: Path, model_family: object = None) -> Table:
    """Return a ``config.json`` in the flat form of its family; of a model of images and text the part of its text
    model, except for the local ``model_family`` that has it. Raises FileNotFoundError, UserError for a damaged file."""
    config = read_json(path)
    kind = known_families().get(str(config.get("model_type")))
    if kind is not None and kind.model_family == model_family:
        return kind.flat(config)
    for family in known_families().values():
        box = family.container
        if box is not None and config.get("model_type") == box.model_type:
            part = config.get("text_config", config)
            if not isinstance(part, dict):
                raise UserError(f"{path}: text_config is {part!r:.80}, expected an object")
            outer = {name: config[name] for name in ("tie_word_embeddings", KEY) if name in config}
            return {**part, **outer, "model_type": family.model_type}
    return config


def find_family(config: Mapping[str, object]) -> Family:
    """Return the family of a ``config.json`` by its model_type, or, only without one, by its architectures. Raises
    UserError for an unknown model_type, or ``architectures`` that it does not convert; they may be missing or empty."""
    table, kind, names = known_families(), config.get("model_type"), config.get("architectures") or []
    if not isinstance(names, list):
        raise UserError(f"config.json: architectures is {names!r:.200}, expected a list of names")
    if isinstance(kind, str) and kind in table:
        readable = (table[kind].architecture, *table[kind].also_read)
        if names and not any(name in names for name in readable):
            reason = f"{', '.join(readable)} can be converted"
            raise UserError(f"config.json: architectures is {names!r:.200}; of {kind}, {reason}")
        return table[kind]
    if kind is None:
        for family in table.values():
            if family.architecture in names:
                return family
    listed = ", ".join(sorted(table))
    raise UserError(f"config.json: model_type is {kind!r:.80}, which cannot be converted; known: {listed}")


def family_for(settings: Mapping[str, object], preferred: str | None = None, *, only: str | None = None) -> Family:
    """Return the first family that supports completed ``settings``: ``preferred`` (ignored if unknown, or if its model
    family differs), then :data:`COMMON`, then in alphabetical order. ``only`` restricts the search to one family.
    Raises UserError: no family matches (lists the reasons of the closest ones), or ``only`` is unknown."""
    table, reasons = known_families(), dict[str, str]()
    if only is not None:
        if only not in table:
            raise UserError(f"{only}: no family that can be converted; known: {', '.join(sorted(table))}")
        table = {only: table[only]}
    else:
        table = {name: family for name, family in table.items() if family.model_family == settings["model_family"]}
    for name in sorted(table, key=lambda candidate: (candidate != preferred, candidate not in COMMON, candidate)):
        try:
            table[name].save_settings(settings)
            return table[name]
        except UserError as error:
            reasons[name] = str(error)
    order = sorted(reasons, key=lambda name: _distance(reasons[name]))
    explanations = [f"not {name}: {reasons[name]}" for name in order[:NEAREST]]
    explanations += [f"further from it: {', '.join(order[NEAREST:])}"] if order[NEAREST:] else []
    raise UserError(f"no Hugging Face family has a model of these settings. {'. '.join(explanations)}")


def _distance(reasons: str) -> tuple[int, int]:
    return sum(f"{kind} is " in reasons for kind in KINDS), reasons.count("; ")


def weight_names(folder: Path) -> set[str]:
    """Return the tensor names in the index, else in ``model.safetensors``; empty if neither can be read (``.bin``)."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    with suppress(OSError, ValueError, RecursionError):
        if index.is_file():
            return {*read_json(index).get("weight_map", ())}
        return {*read_header(single)}
    return set()


def load_settings(folder: Path, model_family: object = None) -> tuple[Family, dict[str, object], list[str]]:
    """Return the family of a folder (of the local ``model_family``, if several read it), the settings of its
    ``config.json``, without defaults, and the keys without effect that are left out. Keys that require certain tensors
    (multi-token prediction layers) are ignored if the safetensors lack these; quantization is no setting. Raises
    UserError: config.json is missing or malformed, its family is unknown, its quantization cannot be read, or values
    cannot be represented: all keys that ``transformers`` reads and the family does not, else the first problem."""
    from megatron.core.tokenizers.end_tokens import read_end_ids  # imports numpy

    try:
        config = dict(read_config(folder / CONFIG, model_family))
    except FileNotFoundError:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder; {folder_fix(str(folder))}") from None
        raise UserError(f"{folder}: no folder of a Hugging Face model: {CONFIG} is missing") from None
    family = find_family(config)
    try:
        weight_format(config)
        config.pop(KEY, None)
        for key, name in family.counts_if_held.items():
            if config.get(key) and name.format(**config) not in weight_names(folder):
                del config[key]
        known = keys_of_transformers(family.architecture)
        unread = [key for key in family.unknown_keys(config) if key.rpartition(".")[2] not in known]
        settings = family.load_settings({key: value for key, value in config.items() if key not in unread})
        if "vision_model_type" in settings:
            settings |= read_image_settings(folder)
        ids = read_end_ids(folder)
        return family, settings | ({"end_token_ids": ids} if ids else {}), unread
    except (TypeError, LookupError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, UserError):
            raise UserError(f"{folder}: {error}") from None
        raise UserError(f"{folder / CONFIG}: a value has a wrong type ({error!r:.200})") from error
