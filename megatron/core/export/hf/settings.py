"""Rules between ``config.json`` and settings of the command line, each of them for both directions. Torch-free.

A rule names what it reads on either side, so that what no rule reads is found and refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.core.config.errors import UserError

Table = Mapping[str, Any]
REQUIRED = object()
"""Default of a key that config.json must have."""


class Rule(Protocol):
    """Some keys of ``config.json`` beside the settings that say the same."""

    @property
    def theirs(self) -> tuple[str, ...]:
        """Keys that it reads or writes."""

    @property
    def ours(self) -> tuple[str, ...]:
        """Settings that it gives or reads."""

    def load(self, config: Table) -> dict[str, Any]:
        """Settings; ``UserError`` for what they cannot say."""

    def save(self, settings: Table) -> dict[str, Any]:
        """Keys of config.json; ``UserError`` for settings that the family does not have."""


def refuse_key(name: str, value: Any, reason: str) -> UserError:
    """The error for a key of config.json."""
    return UserError(f"config.json: {name} is {value!r:.200}, {reason}")


def refuse_setting(name: str, value: Any, reason: str) -> UserError:
    """The error for a setting that a family lacks."""
    return UserError(f"{name} is {value!r:.200}, {reason}")


def get(config: Table, names: tuple[str, ...], default: Any) -> Any:
    """The first of ``names`` that is there; null counts as absent, as it does for ``transformers``."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is REQUIRED:
        raise UserError(f"config.json: {names[0]} is missing")
    return default(config) if callable(default) else default


class Same:
    """One value under two names. ``keys``: their names for it; the first is written.

    Args:
        default: what an absent key means: a value, or a function of config.json.
        written: False: only read, as another rule writes the key or the weights do not depend on it.
    """

    def __init__(self, setting: str, *keys: str, default: Any = REQUIRED, written: bool = True) -> None:
        self.setting, self.theirs, self.ours = setting, keys, (setting,)
        self.default, self.written = default, written

    def load(self, config: Table) -> dict[str, Any]:
        return {self.setting: get(config, self.theirs, self.default)}

    def save(self, settings: Table) -> dict[str, Any]:
        return {self.theirs[0]: settings[self.setting]} if self.written else {}


@dataclass(frozen=True)
class Choice:
    """A key each of whose values means some settings; of several with equal settings the first is written."""

    key: str
    options: Mapping[Any, Table]
    default: Any = REQUIRED

    @property
    def theirs(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def ours(self) -> tuple[str, ...]:
        return tuple({name: None for option in self.options.values() for name in option})

    def load(self, config: Table) -> dict[str, Any]:
        value = get(config, (self.key,), self.default)
        try:
            return dict(self.options[value])
        except (KeyError, TypeError):
            known = ", ".join(repr(each) for each in self.options)
            raise refuse_key(self.key, value, f"which cannot be represented; known: {known}") from None

    def save(self, settings: Table) -> dict[str, Any]:
        for value, option in self.options.items():
            if all(settings[name] == wanted for name, wanted in option.items()):
                return {self.key: value}
        found = ", ".join(f"{name} {settings[name]!r:.60}" for name in self.ours)
        raise UserError(f"{found}: none of what {self.key} can say ({', '.join(map(str, self.options))})")


@dataclass(frozen=True)
class Ours:
    """Settings that every model of the family has."""

    fixed: Table

    @property
    def theirs(self) -> tuple[str, ...]:
        return ()

    @property
    def ours(self) -> tuple[str, ...]:
        return tuple(self.fixed)

    def load(self, config: Table) -> dict[str, Any]:
        return dict(self.fixed)

    def save(self, settings: Table) -> dict[str, Any]:
        for name, wanted in self.fixed.items():
            if settings[name] != wanted:
                raise refuse_setting(name, settings[name], f"the family has {wanted!r} alone")
        return {}


@dataclass(frozen=True)
class Begin(Ours):
    """Settings that a run begins with, and that do not matter to what the weights are."""

    def save(self, settings: Table) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Theirs:
    """Keys that must have one value, as no setting says anything else."""

    fixed: Table
    defaults: Table = field(default_factory=dict)
    """What an absent key means, where that is another value."""

    @property
    def theirs(self) -> tuple[str, ...]:
        return tuple(self.fixed)

    @property
    def ours(self) -> tuple[str, ...]:
        return ()

    def load(self, config: Table) -> dict[str, Any]:
        for name, wanted in self.fixed.items():
            value = get(config, (name,), self.defaults.get(name, wanted))
            if value != wanted:
                raise refuse_key(name, value, f"which cannot be represented: only {wanted!r} can")
        return {}

    def save(self, settings: Table) -> dict[str, Any]:
        return dict(self.fixed)


@dataclass(frozen=True)
class Ignored:
    """Keys that say nothing about what the model computes."""

    keys: tuple[str, ...]

    @property
    def theirs(self) -> tuple[str, ...]:
        return self.keys

    @property
    def ours(self) -> tuple[str, ...]:
        return ()

    def load(self, config: Table) -> dict[str, Any]:
        return {}

    def save(self, settings: Table) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Computed:
    """Anything else: one function for each direction."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    load: Callable[[Table], dict[str, Any]]
    save: Callable[[Table], dict[str, Any]]
