"""Other distributions with modules named ``megatron.…``: megatron-energon, megatron-bridge, NVIDIA's megatron-core."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType

from megatron.compat.names import Finder, missing_reason


def open_namespace(path: list[str]) -> list[str]:
    """Return ``path``, the folders of this package, followed by all folders ``megatron`` on ``sys.path``. Warns, on
    rank 0, if one of them has NVIDIA's ``megatron.core``; modules of Megatron-LM then still come from ``path`` only.
    Raises ImportError: megatron-core is installed in the same folder: files of one package overwrite the other."""
    home = Path(path[0])
    if installed := sorted(home.parent.glob("megatron_core-*.dist-info")):
        raise ImportError(
            f"{installed[0].stem} is installed in {home.parent}, the folder of megatron-pretraining: files of one have "
            "replaced files of the other; run pip uninstall -y megatron-core megatron-pretraining, then install one"
        )
    folders = list(extend_path(path, "megatron"))
    places = {os.path.realpath(folder) for folder in path}
    foreign = [folder for folder in folders if os.path.realpath(folder) not in places]
    duplicates = [folder for folder in foreign if (Path(folder) / "core" / "__init__.py").is_file()]
    if duplicates:
        sys.meta_path.insert(0, MissingModules)  # type: ignore[arg-type]  # a class with Finder's find_spec
        if os.environ.get("RANK", "0") == "0":
            warnings.warn(
                f"two packages are named megatron.core: {home} is imported, {', '.join(duplicates)} is not; "
                "remove one of them from the environment (pip uninstall megatron-core)",
                stacklevel=3,
            )
    return folders


class MissingModules(Finder):
    """Finder that answers first for modules of Megatron-LM that do not exist here; other folders are not searched."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = Path(__file__).parents[1].joinpath(*fullname.split(".")[1:])
        if file.is_dir() or file.with_suffix(".py").is_file() or not missing_reason(fullname):
            return None
        return super().find_spec(fullname, path, target)
