"""Tasks of lm-evaluation-harness by their names. Torch-free: a wrong name is found before a model is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.core.extensions.installed import is_installed

if TYPE_CHECKING:
    from os import PathLike


def check_package(user: str) -> None:
    """Raise UserError, which begins with ``user``, if the harness is not installed."""
    if not is_installed("lm_eval"):
        raise UserError(f"{user}: needs the package lm_eval, which is not installed; pip install lm-eval")


def find_tasks(flag: str, names: Sequence[str], include_path: str | PathLike | None) -> Any:
    """Return the harness's ``TaskManager``. UserError names ``flag``: no package, unknown tasks or none."""
    check_package(flag)
    folder = None if include_path is None else str(include_path)
    reason = "lm-evaluation-harness and the folder of tasks have no such task"
    if absent := _names_in_no_file(names, folder):
        raise UserError(f"{flag} {absent[0]}: {reason}")
    from lm_eval.tasks import TaskManager

    if folder and names:  # the package's own 14,000 tasks take 6 s to list; groups and tags may contain them
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if not manager.match_tasks([name])] or (not names and ["(empty)"]):
        raise UserError(f"{flag} {unknown[0]}: {reason}")
    return manager


def _names_in_no_file(names: Sequence[str], folder: str | None) -> list[str]:
    """Return the names without wildcards that no file of the harness's tasks or in ``folder`` contains as a word. Reads
    16,000 files in a second, where importing the harness and indexing them takes 20 s. Names in files may be no tasks:
    the index decides."""
    spec = find_spec("lm_eval")
    roots = [os.path.join(root, "tasks") for root in (spec and spec.submodule_search_locations) or ()]
    missing = [name for name in names if re.fullmatch(r"[\w.-]+", name)] if roots else []
    for root in filter(None, (folder, *roots)):
        for directory, _, files in os.walk(root):
            for file in files:
                if not missing or not file.endswith((".yaml", ".yml", ".py")):
                    continue
                with suppress(OSError):
                    text = Path(directory, file).read_bytes()
                    missing = [name for name in missing if not _has_word(name.encode(), text)]
    return missing


def _has_word(word: bytes, text: bytes) -> bool:
    return word in text and re.search(rb"(?<![\w.-])" + re.escape(word) + rb"(?![\w.-])", text) is not None
