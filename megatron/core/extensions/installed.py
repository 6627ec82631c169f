"""Detection of installed optional packages and loaded shared libraries. Torch-free."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def is_installed(module: str) -> bool:
    """Return whether ``import module`` finds a package or module, not only a folder. Imports parents only."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # already imported, and not from a file
        return True
    return spec is not None and spec.loader is not None and spec.origin is not None


def loaded_libraries(prefix: str) -> list[Path]:
    """Return the paths of the shared libraries that this process has loaded (mapped) and whose file names start with
    ``prefix``, sorted; empty where /proc does not exist, i.e. except on Linux."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f"/{prefix}" in line}
    return sorted(path for path in paths if path.name.startswith(prefix))
