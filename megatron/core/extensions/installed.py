"""Whether an optional package is there, without importing it. Torch-free."""

from __future__ import annotations

import importlib.util


def is_installed(module: str) -> bool:
    """Whether ``import module`` finds a package or module; a bare folder of that name does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # imported already, and not from a file
        return True
    return spec is not None and spec.loader is not None and spec.origin is not None
