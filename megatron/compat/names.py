"""Names that programs written for Megatron-LM import and that are elsewhere here, or do not exist: ``names.tsv``.

Each row has three columns, separated by tabs: a module of Megatron-LM, where its names come from, and the names. A name
``new=old`` is called ``old`` at its source; ``*`` stands for all names of the source. The source is a module of this
library, or ``absent: REASON`` for a capability that does not exist: such names can be imported, annotated, subclassed
and compared with, and raise a ``UserError`` when they are called. ``module: REASON; FIX`` stands for a module that does
not exist, ``family: MODELS`` for one whose model family does not: importing it, or a module below it, raises a
``MissingModule``; if the module has other rows or a file, only modules below it that have none. Nothing is imported
before a name is used.

Modules that exist here serve the names of the table through ``megatron.serve_other_names(__name__)``. The other modules
of the table come from :class:`Finder`, which Python asks after all others. Standard library only."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

ABSENT = "absent: "
FAMILY = "family: "
MODULE = "module: "
ALL = "*"
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class NameSource(NamedTuple):
    """The origin of a name."""

    module: str
    """A module of this library, ``absent: REASON`` or ``family: MODELS``."""
    name: str


@functools.cache
def table() -> dict[str, dict[str, NameSource]]:
    """Return {module: {name: source}} of ``names.tsv``, modules with the prefix ``megatron.``."""
    sources: dict[str, dict[str, NameSource]] = {}
    for line in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        module, source, names = line.split("\t")
        for entry in names.split():
            name, _, older = entry.partition("=")
            sources.setdefault(f"megatron.{module}", {})[name] = NameSource(source, older or name)
    return sources


def attribute(module: str, name: str) -> Any:
    """Return what programs get as ``name`` from ``module``, importing its source; for names that do not exist here, a
    class or function that raises UserError when called. Raises AttributeError for a name that is not in the table."""
    sources = table().get(module, {})
    source = sources.get(name)
    if source is None and ALL in sources and not name.startswith("__") and not missing_reason(module):
        source = sources[ALL]._replace(name=name)
    if source is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if source.module.startswith(ABSENT):
        return _absent(name, source.module.removeprefix(ABSENT))
    return getattr(import_module(source.module), source.name)


@functools.cache
def _absent(name: str, reason: str) -> Any:
    """A class for a capitalized name, else a function; raises ``UserError`` when it is called."""

    def fail(*_: object, **__: object) -> Any:
        from megatron.core.config.errors import UserError

        raise UserError(f"{name}: not available here; {reason}")

    if name.lstrip("_")[:1].isupper():
        return type(name, (), {"__init__": fail, "__doc__": f"Not available here; {reason}.", "__module__": __name__})
    fail.__name__ = fail.__qualname__ = name
    fail.__doc__ = f"Not available here; {reason}."
    return fail


def serve_other_names(module: str) -> None:
    """Give the imported ``module`` a ``__getattr__`` that finds the names of the table. Also sets ``__all__`` if it is
    missing in a module that is no package, and an empty ``__path__`` if the table has modules below it."""
    target = sys.modules[module]
    if not hasattr(target, "__all__") and not hasattr(target, "__path__"):  # ``import *`` takes the table's names too
        public = [name for name in vars(target) if not name.startswith("_")]
        target.__all__ = public + [name for name in table().get(module, {}) if name != ALL]  # type: ignore[attr-defined]
    target.__getattr__ = functools.partial(attribute, module)  # type: ignore[method-assign]
    if not hasattr(target, "__path__") and module in _packages():
        target.__path__ = []  # submodules of the table: Python looks for submodules of packages only


def serve_calls(module: str, applies: Callable[..., bool]) -> Callable[[AnyFunction], AnyFunction]:
    """Decorate a function that has another signature than Megatron-LM's: a call for whose arguments ``applies`` returns
    True goes to the function of the same name in ``module``, imported at the first such call."""

    def decorate(function: AnyFunction) -> AnyFunction:
        @functools.wraps(function)
        def dispatch(*args: object, **kwargs: object) -> object:
            if applies(*args, **kwargs):
                return getattr(import_module(module), function.__name__)(*args, **kwargs)
            return function(*args, **kwargs)

        return dispatch  # type: ignore[return-value]

    return decorate


@functools.cache
def _packages() -> frozenset[str]:
    parts = (name.split(".") for name in table())
    return frozenset(".".join(part[:end]) for part in parts for end in range(1, len(part)))


def missing_reason(module: str) -> str:
    """Return the reason why ``module`` does not exist: in its row, or in the row for the nearest package."""
    while module:
        text = table().get(module, {}).get(ALL, NameSource("", "")).module
        if text.startswith(FAMILY):
            return f"{text.removeprefix(FAMILY)} are not available here; use Megatron-LM for this program"
        if text.startswith(MODULE):
            return text.removeprefix(MODULE)
        module = module.rpartition(".")[0]
    return ""


class Finder:
    """Finder and loader of modules that exist in the table only; appended to ``sys.meta_path``."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of the table, a parent of one, or a module below one that does not exist."""
        if not fullname.startswith("megatron."):
            return None
        if fullname not in table().keys() | _packages() and not missing_reason(fullname):
            return None
        return ModuleSpec(fullname, cls(), is_package=True)  # type: ignore[arg-type]  # importlib.abc takes 17 ms to import

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own."""

    def exec_module(self, module: ModuleType) -> None:
        """Serve the names of the table; ``import *`` takes all of them, and for a row ``*`` all public names of its
        source. Raises MissingModule for modules that do not exist here."""
        module.__doc__ = "Names of Megatron-LM (``megatron.compat.names``)."
        names = table().get(module.__name__, {})
        public = [name for name in names if name != ALL]
        reason = missing_reason(module.__name__)
        if reason and not public and module.__name__ not in _packages():
            from megatron.core.config.errors import MissingModule

            raise MissingModule(module.__name__, reason)
        if ALL in names and not reason:
            public += [name for name in vars(import_module(names[ALL].module)) if not name.startswith("_")]
        module.__all__ = public  # type: ignore[attr-defined]
        serve_other_names(module.__name__)
