"""Registry of model families: every folder of this package with a ``family.py``. Torch-free."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.config.optional import OptionalGroup
from megatron.core.models.family import ModelFamily, Program


@functools.cache
def families() -> dict[str, ModelFamily]:
    """Return the families of this package by name: the default one first, then in alphabetical order."""
    names = sorted(path.parent.name for path in Path(__file__).parent.glob("*/family.py"))
    unordered = [get_family(f"{__package__}.{name}.family") for name in names]
    return {family.name: family for family in sorted(unordered, key=lambda family: not family.is_default)}


def default_family() -> str:
    """Return the name of the family that is meant where none is named."""
    return next(iter(families()))


@functools.cache
def get_family(name: str) -> ModelFamily:
    """Return the family ``name``of this package, or of the module with this dotted name. Raises UserError."""
    if "." not in name:
        if name not in families():
            raise UserError(f"{name}: there is no model family of this name; choose from {', '.join(families())}")
        return families()[name]
    try:
        return import_module(name).FAMILY
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # "..", "a..b"
        raise UserError(f"{name}: {error}; name a module that defines FAMILY") from error


def known_family(name: object) -> ModelFamily | None:
    """Return the family ``name`` of this package or of an imported module, else None. Imports nothing."""
    if not isinstance(name, str):
        return None
    return families().get(name) or getattr(sys.modules.get(name), "FAMILY", None)


def programs() -> dict[str, tuple[ModelFamily, Program]]:
    """Return family and program by program name (``gpt``) for all families of this package."""
    return {program.name: (family, program) for family in families().values() for program in family.programs}


def find_program(name: str) -> tuple[ModelFamily, Program]:
    """Return family and program for ``name``: a program's name or script (``gpt``, ``pretrain_gpt.py``), else with dots
    the module of a family, which is imported and whose first program it is. Raises UserError."""
    by_name = programs()
    short = name.removeprefix("pretrain_").removesuffix(".py")
    if short in by_name:
        return by_name[short]
    if "." not in short:
        raise UserError(f"{name}: there is no such program; choose from {', '.join(by_name)}")
    family = get_family(name)
    return family, family.programs[0]


def scripts_with(group: type[OptionalGroup]) -> str:
    """Return the entry scripts of all families that list ``group``, such as "a, b and c"."""
    return scripts_of(program for family, program in programs().values() if group in family.groups)


def scripts_of(programs: Iterable[Program]) -> str:
    """Return the entry scripts of ``programs``, such as "a, b and c"."""
    scripts = [program.script for program in programs]
    return " and ".join(filter(None, (", ".join(scripts[:-1]), *scripts[-1:])))
