"""Groups of flags: dataclasses whose fields are flags of the command line. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
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
    for field in fields(kind):  # type: ignore[arg-type]  # subclasses are dataclasses
        if field.name in values:
            vars(group)[field.name] = values[field.name]
        elif field.default_factory is not MISSING:
            vars(group)[field.name] = field.default_factory()
    vars(group)["frozen"] = True
    return group
