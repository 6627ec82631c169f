"""Check that modules of a layer support context parallelism, under which a rank holds only part of each sequence.

A mixer, a core attention or an indivisible layer declares ``supports_context_parallel = True`` on its class if it
treats tokens one by one or exchanges them over ``groups.cp`` itself. Undeclared classes are rejected if the
context-parallel size is above 1: they would compute a different model without an error. Torch-free, for ``--dry-run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec, build_module

DECLARATION = "supports_context_parallel"
_COMPUTING = ("forward", "segments")


def supports_context_parallel(kind: type) -> bool:
    """Return whether ``kind`` declares context-parallel support for the ``forward`` that it runs.

    A declaration covers its class and subclasses that do not override ``forward`` or ``segments``; a subclass that
    overrides one of them must declare support again.
    """
    for each in kind.__mro__:
        if DECLARATION in vars(each):
            return bool(vars(each)[DECLARATION])
        if any(name in vars(each) for name in _COMPUTING):
            return False
    return False


def build_token_mixer(slot: Any, *args: Any, groups: ProcessGroups, **kwargs: Any) -> Any:
    """Build the module of ``slot``, which may mix tokens of a sequence, like :func:`build_module`.

    Raises:
        UserError: context parallelism is on and the module does not declare support.
    """
    module = build_module(slot, *args, groups=groups, **kwargs)
    if groups.cp.size > 1 and not supports_context_parallel(type(module)):
        raise UserError(f"context_parallel_size {groups.cp.size}: {undeclared(type(module))}; {FIX}")
    return module


def undeclared(kind: type) -> str:
    """Return the reason why ``kind`` is rejected."""
    return f"is not supported by {kind.__module__}.{kind.__qualname__}, which sees only this rank's part of a sequence"


FIX = (
    f"set {DECLARATION} = True on that class if it treats tokens one by one or exchanges them over groups.cp, "
    "or use --context-parallel-size 1"
)


def undeclared_classes(specs: Sequence[ModuleSpec | Callable[..., Any]]) -> Iterator[type]:
    """Yield each class in the slots of layers that does not declare support. Factory functions are skipped: their
    modules are checked when the model is built.
    """
    found = dict.fromkeys(kind for spec in specs for kind in _classes(spec))
    yield from (kind for kind in found if not supports_context_parallel(kind))


def _classes(slot: Any) -> Iterator[type]:
    """Yield the class in a slot (a class, a spec or a partial of a class), then recursively the classes of its
    branches' mixers and of its core attention. Slots with functions yield nothing."""
    submodules = getattr(slot, "submodules", None)
    kind = getattr(slot, "module", slot)
    while isinstance(kind, partial):
        kind = kind.func
    if isinstance(kind, type):
        yield kind
    branches = getattr(submodules, "branches", submodules)
    for branch in branches if isinstance(branches, Sequence) else ():
        if isinstance(branch, BranchSpec):
            yield from _classes(branch.mixer)
    if core := getattr(submodules, "core_attention", None):
        yield from _classes(core)
