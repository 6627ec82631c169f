"""Groups of flags: dataclasses whose fields are flags of the command line. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
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
    names, factories = _fields(kind)  # type: ignore[arg-type]
    vars(group).update({name: make() for name, make in factories.items() if name not in values})
    vars(group).update({name: values[name] for name in names if name in values}, frozen=True)
    return group


@functools.cache
def _fields(kind: type) -> tuple[list[str], dict[str, Callable[[], object]]]:
    factories = {field.name: field.default_factory for field in fields(kind) if callable(field.default_factory)}
    return [field.name for field in fields(kind)], factories
