"""Per-parameter optimizer settings, Megatron-LM's ``config_overrides``.

The overrides map a :class:`ParamKey`, which matches parameters, to settings of their parameter groups."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from torch import nn

from megatron.core.config.errors import UserError


class ParamGroupOverride(TypedDict, total=False):
    """Settings of a parameter group: rates, weight decay, multipliers, Adam's epsilon, update rule; all optional."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float
    lr_mult: float
    eps: float
    optimizer: str


@dataclass(frozen=True)
class ParamPredicate:
    """Named predicate on a parameter. Equality and hash use only the name."""

    name: str
    fn: Callable[[nn.Parameter], bool] = field(compare=False, hash=False)

    def __call__(self, param: nn.Parameter) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """Named predicate on a parameter and its name. Equality and hash use only ``name``."""

    name: str
    fn: Callable[[nn.Parameter, str], bool] = field(compare=False, hash=False)

    def __call__(self, param: nn.Parameter, name: str) -> bool:
        return self.fn(param, name)


@dataclass(frozen=True)
class ParamKey:
    """Matcher of parameters. A parameter matches if any of the fields matches."""

    name: str | tuple[str, ...] = ()
    """Glob patterns for the parameter name, such as ``*.bias``."""
    attr: str | tuple[str, ...] = ()
    """Names of attributes; matches if one of them is true on the parameter."""
    predicate: Any = ()
    """One or several :class:`ParamPredicate`."""
    with_name_predicate: Any = ()
    """One or several :class:`ParamWithNamePredicate`."""

    def matches(self, param: nn.Parameter, param_name: str) -> bool:
        """Return whether any field matches: a glob pattern matches the name, an attribute is true on the parameter, or
        a predicate returns true. A key without fields matches nothing."""
        return (
            any(fnmatch.fnmatch(param_name, pattern) for pattern in _several(self.name))
            or any(getattr(param, attribute, False) for attribute in _several(self.attr))
            or any(predicate(param) for predicate in _several(self.predicate))
            or any(predicate(param, param_name) for predicate in _several(self.with_name_predicate))
        )


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


Overrides = Mapping[ParamKey, ParamGroupOverride]


def find_overrides(overrides: Overrides, param: nn.Parameter, name: str) -> dict[str, Any]:
    """Return the merged settings of all keys that match the parameter; empty if none matches. Raises UserError if a
    matching key has an unknown setting, or two matching keys give different values for the same setting."""
    merged: dict[str, Any] = {}
    for key, values in overrides.items():
        if not key.matches(param, name):
            continue
        if unknown := sorted(values.keys() - ParamGroupOverride.__annotations__.keys()):
            raise UserError(
                f"config_overrides: {', '.join(unknown)}: are no settings of a parameter group; choose from "
                f"{', '.join(sorted(ParamGroupOverride.__annotations__))}"
            )
        for setting, value in values.items():
            if merged.setdefault(setting, value) != value:
                raise UserError(f"config_overrides: {setting} of {name}: both {merged[setting]} and {value}; keep one")
    return merged
