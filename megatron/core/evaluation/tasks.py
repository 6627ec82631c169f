"""Tasks of lm-evaluation-harness by their names. Torch-free: a wrong name is found before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
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
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    if folder and names:  # the package's own 14,000 tasks take 6 s to list; groups and tags may contain them
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if not manager.match_tasks([name])] or (not names and ["(empty)"]):
        raise UserError(f"{flag} {unknown[0]}: lm-evaluation-harness and the folder of tasks have no such task")
    return manager
