"""Sites: the calls of a module that policies may wrap, by name. A module declares them on its class and makes them
through ``self.at``; policies (recomputation, offload, fp8 … in ``policies.py``) attach from outside.

    calls  = ("core_attn",)                  may run again in backward
    spans  = ("qkv_linear", "attn_proj")     run once: a collective may be in flight at their start or end
    results = ("mla_up_proj",)               outputs that are computed again for their readers, instead of being saved

    mixed = self.at.core_attn(self.core_attention, query, key, value, ctx)
    with self.kept.mla_up_proj(heads, self._heads, latent):  # here ``heads`` are read
        ...

Users name sites in --recompute-modules (calls, results) and --offload-modules (calls, spans): a new mixer has these
policies as soon as it declares sites. Names that start with ``_`` are not for users."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

Run = Callable[..., Any]
"""``run(function, *args)`` returns ``function(*args)`` under the policies of a site."""
Keep = Callable[..., AbstractContextManager]
"""``keep(result, function, *args)``, with result = ``function(*args)``: context in which operations read ``result``."""


if sys.version_info >= (3, 11):
    from operator import call  # adds no frame to traces
else:

    def call(function: Callable, *args: object) -> object:
        """Return ``function(*args)``."""
        return function(*args)


def save(result: object, function: Callable, *args: object) -> AbstractContextManager:
    """Context in which operations save ``result`` as usual."""
    return nullcontext()


class Sites:
    """The sites of one kind of one object, as attributes. Without policies they are :func:`call` or :func:`save`."""

    def __init__(self, names: Iterable[str], plain: Callable[..., Any]) -> None:
        self._plain = plain
        vars(self).update(dict.fromkeys(names, plain))

    def __getattr__(self, name: str) -> Any:  # called for unknown names only
        raise AttributeError(f"no site {name!r} is declared; sites: {', '.join(self.names)}")

    def __setattr__(self, name: str, value: Any) -> None:  # for type checkers
        object.__setattr__(self, name, value)

    @property
    def names(self) -> list[str]:
        """Names of the sites."""
        return [name for name in vars(self) if name != "_plain"]

    def is_plain(self, name: str) -> bool:
        """Return whether no policy has replaced the site."""
        return getattr(self, name) is self._plain

    def clear(self, name: str) -> None:
        """Remove all policies from a site."""
        setattr(self, name, self._plain)


class Sited:
    """Base of classes with sites. Call :meth:`open_sites` in the constructor."""

    calls: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    at: Sites
    kept: Sites

    def open_sites(self) -> None:
        """Create ``at`` and ``kept`` from the declarations."""
        self.at, self.kept = Sites((*self.calls, *self.spans), call), Sites(self.results, save)


class Policy(Protocol):
    """A function that is attached to sites, such as recomputation."""

    def attach(self, owner: Sited) -> None:
        """Replace sites of ``owner`` by wrapped ones."""


def sited(model: nn.Module) -> Iterator[Sited]:
    """Yield the objects with sites in ``model``, its branches included."""
    for module in model.modules():
        if isinstance(module, Sited):
            yield module
        for branch in getattr(module, "branches", ()):
            if isinstance(branch, Sited):
                yield branch


def install(model: nn.Module, policies: Iterable[Policy]) -> None:
    """Attach ``policies`` to the sites of ``model``; later ones wrap earlier ones."""
    for policy in policies:
        for owner in sited(model):
            policy.attach(owner)


def known_sites(*kinds: str, owners: Iterable[Any] = ()) -> list[str]:
    """Return the sorted names of the ``kinds`` of sites (``calls`` …) that loaded classes and ``owners`` declare."""
    classes: list[Any] = [Sited]
    for kind in classes:
        classes.extend(kind.__subclasses__())
    names = {name for owner in (*classes, *owners) for kind in kinds for name in getattr(owner, kind)}
    return sorted(name for name in names if not name.startswith("_"))
