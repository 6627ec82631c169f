"""Declarations of the token layouts that modules support; a context-parallel rank holds some tokens of each sequence.

A mixer, a core attention or an indivisible layer declares on its class

    mixes_tokens = False                           tokens are processed independently: supports every layout
    mixes_tokens, layouts = True, {"zigzag", …}    exchanges tokens by ``ctx.layout``; supports these orders

Other classes are rejected under context parallelism: they would compute a different model without an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron.core.attention.token_layout import ONE_RANK
from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec, build_module

_COMPUTING = ("forward", "segments")


def layout_problem(kind: type, order: str = ONE_RANK.order) -> str | None:
    """Return why ``kind`` cannot run on a part of each sequence, with tokens in ``order``; None if it can. A subclass
    that overrides ``forward`` or ``segments`` must declare again."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    for cls in kind.__mro__:
        declared = vars(cls)
        if "mixes_tokens" in declared:
            layouts = declared.get("layouts", frozenset())
            if not declared["mixes_tokens"] or order in layouts:
                return None
            return f"is not supported by {name}, which takes {', '.join(sorted(layouts)) or 'no'} layouts, not {order}"
        if any(method in declared for method in _COMPUTING):
            break
    return f"is not supported by {name}, which sees only this rank's part of a sequence"


FIX = (
    "set mixes_tokens = False on that class if it treats tokens one by one, or mixes_tokens = True and layouts if it "
    "exchanges them by ctx.layout; or use --context-parallel-size 1"
)


def build_token_mixer(slot: Any, *args: object, groups: ProcessGroups, **kwargs: object) -> Any:
    """Build the module of ``slot``, which may mix tokens of a sequence, like :func:`build_module`. Raises UserError if
    :func:`layout_problem` has a reason against context parallelism."""
    module = build_module(slot, *args, groups=groups, **kwargs)
    ranks = groups.cp.size
    if ranks > 1 and (reason := layout_problem(type(module))):
        raise UserError(f"context_parallel_size {ranks}: {reason}; {FIX}")
    return module


def cache_problem(model: nn.Module) -> str | None:
    """Return why the layers of ``model`` cannot run on a :class:`CachedLayout`; None if they can."""
    layers: list[Any] = [layer for module in model.modules() for layer in getattr(module, "layers", ())]
    mixers = [branch.mixer for layer in layers for branch in getattr(layer, "branches", ())]
    cores = [mixer.core_attention for mixer in mixers if hasattr(mixer, "core_attention")]
    for module in (*layers, *mixers, *cores):
        if problem := layout_problem(type(module), "cached"):
            return problem
    return None


def layout_problems(specs: Sequence[ModuleSpec | Callable[..., object]]) -> Iterator[str]:
    """Yield the problem of each class in the slots of layers that cannot run under context parallelism. Factory
    functions are skipped: their modules are checked when the model is built."""
    kinds = dict.fromkeys(kind for spec in specs for kind in _classes(spec))
    yield from filter(None, map(layout_problem, kinds))


def _classes(slot: object) -> Iterator[type]:
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
