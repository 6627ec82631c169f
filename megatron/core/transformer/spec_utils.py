"""Layer specifications: which class fills which slot of a layer, chosen before anything is built."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config.errors import UserError


@dataclass
class ModuleSpec:
    """A class (or any function that returns a module), constructor arguments, and the specs of its own slots.

    Each call of a function that makes specs returns fresh ones: a program may replace their parts before it builds.
    """

    module: Callable[..., Any]
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None


@dataclass
class BranchSpec:
    """One residual branch of a layer, x + dropout(mixer(norm(x))). Parameters are called by ``name`` and ``norm_name``.
    Where ``norm_placement`` asks for a norm behind the mixer, it is a second one of the same kind.

    A stage may end behind any branch. ``mixer`` may bring a ``describe(config, place)`` (``description.py``).
    """

    name: str
    mixer: ModuleSpec | Callable[..., Any]
    norm: ModuleSpec | Callable[..., Any]
    norm_name: str = ""
    """Left out: ``pre_<name>_layernorm``."""
    site: str = ""
    """Name by which dropout masks are drawn; left out: ``name``."""

    def __post_init__(self) -> None:
        self.norm_name = self.norm_name or f"pre_{self.name}_layernorm"
        self.site = self.site or self.name

    @property
    def post_norm_name(self) -> str:
        """The name of the norm behind the mixer among the layer's modules."""
        return f"post_{self.name}_layernorm"

    @property
    def dropout_name(self) -> str:
        """The name of the dropout among the layer's modules."""
        return f"{self.site.replace(' ', '_')}_dropout"


def build_module(spec: ModuleSpec | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Instantiate a spec, or a class as it is. A spec's submodules go to the constructor as ``submodules``. A
    layer of the library that is not given ``groups`` gets those of ``parallel_state``."""
    if not isinstance(spec, ModuleSpec):
        spec = ModuleSpec(spec)
    if spec.submodules is not None:
        kwargs["submodules"] = spec.submodules
    if "groups" not in {*spec.params, *kwargs} and _needs_groups(spec.module):
        from megatron.core import parallel_state  # torch: rules and --dry-run read specs without it

        kwargs["groups"] = parallel_state.get_process_groups()
    return spec.module(*args, **spec.params, **kwargs)


def _needs_groups(module: Callable[..., Any]) -> bool:
    declared = inspect.signature(module).parameters.get("groups")
    return declared is not None and declared.default is inspect.Parameter.empty


def import_module(module_path: str | Sequence[str]) -> Any:
    """The object that ``--spec MODULE NAME`` names, or ``"package.module.name"``.

    Raises:
        ValueError: there is no such module or name in it.
    """
    parts = [module_path] if isinstance(module_path, str) else list(module_path)
    home, name = parts if len(parts) == 2 else ".".join(parts).rpartition(".")[::2]
    try:
        return getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # TypeError: a name that begins with a dot
        raise UserError(f"--spec {' '.join(parts)}: {error}; give a module and a name in it") from error
