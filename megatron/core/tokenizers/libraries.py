"""The optional libraries of tokenizing and preprocessing, each asked for here and nowhere else.

Importing this package needs numpy only; a library is loaded when a tokenizer or a file format that needs it is built,
and an absent one is answered with the flag that asked for it and the command that installs it."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from megatron.core.config.errors import UserError


def is_installed(module: str) -> bool:
    """Whether ``module`` could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def require(module: str, asked_by: str) -> ModuleType:
    """Import and return ``module``. Raises UserError, with ``asked_by`` (the flag and value that need it) and the pip
    command, if its package is missing or broken."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{asked_by} needs the package {package!r}, which cannot be imported ({error}); "
            f"install it with: pip install {package}"
        ) from error
