"""Which optional packages are there, and which shared libraries this process has loaded. Torch-free."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def is_installed(module: str) -> bool:
    """Whether ``import module`` finds a package or module; a bare folder of that name does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # imported already, and not from a file
        return True
    return spec is not None and spec.loader is not None and spec.origin is not None


def loaded_libraries(prefix: str) -> list[Path]:
    """Files of the shared libraries in this process whose names begin with ``prefix``, sorted; on Linux only."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f"/{prefix}" in line}
    return sorted(path for path in paths if path.name.startswith(prefix))
