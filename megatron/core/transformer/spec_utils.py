"""Layer specs: the class of each slot of a layer, chosen before any module is built."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from megatron import serve_other_names
from megatron.core.config.errors import UserError


@dataclass
class ModuleSpec:
    """Class with its constructor arguments and the specs of its slots. Calling the spec builds the module.

    ``module`` may also be ``("package.module", "Name")``, which is imported when it is built, or a Python function:
    one with a required parameter ``groups`` returns the module, any other one fills the slot itself. Functions that
    make specs return a new one at each call, because programs may modify them before building."""

    module: Callable[..., object] | tuple[str, str]
    params: dict[str, object] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, object] = field(default_factory=dict)
    """Notes of programs; not read."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Same as :func:`build_module`."""
        return build_module(self, *args, **kwargs)


@dataclass
class BranchSpec:
    """Residual branch x + dropout(mixer(norm(x))) of a layer. ``name`` and ``norm_name`` are the prefixes of its
    parameters. If ``norm_placement`` adds a norm after the mixer, it is a second one of the same kind.

    A pipeline stage may end after any branch. ``mixer`` may define ``describe(config, place)`` (``description.py``)."""

    name: str
    mixer: ModuleSpec | Callable[..., object]
    norm: ModuleSpec | Callable[..., object]
    norm_name: str = ""
    """Default: ``pre_<name>_layernorm``."""
    site: str = ""
    """Name that seeds the dropout masks; default: ``name``."""

    def __post_init__(self) -> None:
        self.norm_name = self.norm_name or f"pre_{self.name}_layernorm"
        self.site = self.site or self.name

    @property
    def post_norm_name(self) -> str:
        """Name under which the layer registers the norm after the mixer."""
        return f"post_{self.name}_layernorm"

    @property
    def dropout_name(self) -> str:
        """Name under which the layer registers the dropout."""
        return f"{self.site.replace(' ', '_')}_dropout"


def build_module(spec: ModuleSpec | Callable[..., object], *args: object, **kwargs: object) -> Any:
    """Instantiate a spec or a class; a spec's submodules are passed as ``submodules``. A class with a required
    parameter ``groups`` that is not passed gets the groups of ``parallel_state``. A Python function
    without such a parameter is returned as it is, as in Megatron-LM."""
    if not isinstance(spec, ModuleSpec):
        spec = ModuleSpec(spec)
    module = get_module(spec)
    if isinstance(module, FunctionType) and not _needs_groups(module):
        return module
    if spec.submodules is not None:
        kwargs["submodules"] = spec.submodules
    if "groups" not in {*spec.params, *kwargs} and _needs_groups(module):
        from megatron.core import parallel_state  # late import, needs torch: rules and --dry-run read specs without it

        kwargs["groups"] = parallel_state.get_process_groups()
    return module(*args, **spec.params, **kwargs)


def get_module(spec: ModuleSpec | Callable[..., object]) -> Callable[..., Any]:
    """Return the class or function of a spec, imported if the spec names it; other arguments as they are."""
    module = spec.module if isinstance(spec, ModuleSpec) else spec
    return import_module(module) if isinstance(module, tuple | list) else module  # type: ignore[return-value]


def _needs_groups(module: Callable[..., object]) -> bool:
    declared = inspect.signature(module).parameters.get("groups")
    return declared is not None and declared.default is inspect.Parameter.empty


def import_module(module_path: str | Sequence[str]) -> object:
    """Import the object that ``--spec MODULE NAME``, or ``"package.module.name"``, names; this runs the module's code,
    whose other exceptions pass. Raises UserError: the module or the name does not exist, or the import fails."""
    parts = [module_path] if isinstance(module_path, str) else list(module_path)
    home, name = parts if len(parts) == 2 else ".".join(parts).rpartition(".")[::2]
    try:
        return getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # TypeError: a name that starts with a dot
        raise UserError(f"--spec {' '.join(parts)}: {error}; give a module and a name in it") from error


serve_other_names(__name__)
