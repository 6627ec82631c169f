"""Groups of flags: dataclasses whose fields are flags of the command line. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import TypeVar

Group = TypeVar("Group", bound="FlagGroup")


class FlagGroup:
    """Base class of groups. Objects that belong to the configuration of a run are frozen."""

    def __setattr__(self, name: str, value: object) -> None:
        if "frozen" in self.__dict__:
            raise AttributeError(f"the configuration is frozen: {name} cannot be set to {value!r} any more")
        super().__setattr__(name, value)


def frozen_group(kind: type[Group], values: Mapping[str, object]) -> Group:
    """Return a frozen object of ``kind`` with ``values``. Bypasses the constructor: rules check values."""
    group = kind.__new__(kind)
    content = vars(group)
    for name, factory in _factories(kind):  # type: ignore[arg-type]
        if name in values:
            content[name] = values[name]
        elif factory is not None:
            content[name] = factory()
    content["frozen"] = True
    return group


@functools.cache
def _factories(kind: type) -> list[tuple[str, Callable[[], object] | None]]:
    factories = ((field.name, field.default_factory) for field in fields(kind))
    return [(name, None if factory is MISSING else factory) for name, factory in factories]  # type: ignore[misc]
