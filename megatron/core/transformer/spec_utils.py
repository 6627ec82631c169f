"""Layer specifications: which class fills which slot of a layer, chosen before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModuleSpec:
    """A class (or any function that returns a module), constructor arguments, and the specs of its own slots."""

    module: Callable[..., Any]
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None


def build_module(spec: ModuleSpec | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Instantiate a spec, or a class as it is. A spec's submodules go to the constructor as ``submodules``."""
    if not isinstance(spec, ModuleSpec):
        return spec(*args, **kwargs)
    if spec.submodules is not None:
        kwargs["submodules"] = spec.submodules
    return spec.module(*args, **spec.params, **kwargs)
