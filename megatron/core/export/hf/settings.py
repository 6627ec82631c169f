"""Rules between ``config.json`` and settings of the command line, each of them for both directions. Torch-free.

A rule names what it reads on either side, so that what no rule reads is found and refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.core.config.errors import UserError

Table = Mapping[str, Any]
REQUIRED = object()
"""Default of a key that config.json must have."""


def refuse(name: str, value: Any, reason: str) -> UserError:
    """The error for a key of config.json, or for a setting that a family lacks."""
    return UserError(f"{name} is {value!r:.200}, {reason}")


def get(config: Table, names: Iterable[str], default: Any = REQUIRED) -> Any:
    """The first of ``names`` that is there; null counts as absent, as it does for ``transformers``."""
    names = tuple(names)
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is REQUIRED:
        raise UserError(f"config.json: {names[0]} is missing")
    return default(config) if callable(default) else default


class Rule:
    """Keys of ``config.json`` (``theirs``) beside the settings that say the same (``ours``)."""

    def __init__(self, theirs: Iterable[str] = (), ours: Iterable[str] = ()) -> None:
        self.theirs, self.ours = tuple(theirs), tuple(ours)

    def load(self, config: Table) -> dict[str, Any]:
        """Settings; ``UserError`` for what they cannot say."""
        return {}

    def save(self, settings: Table) -> dict[str, Any]:
        """Keys of config.json; ``UserError`` for settings that the family does not have."""
        return {}


class Ignored(Rule):
    """Keys that say nothing about what the model computes."""


class Same(Rule):
    """One value under two names. ``keys``: their names for it; the first is written.

    Args:
        default: what an absent key means: a value, or a function of config.json.
        written: False: only read, as another rule writes the key.
    """

    def __init__(self, setting: str, *keys: str, default: Any = REQUIRED, written: bool = True) -> None:
        super().__init__(keys, (setting,))
        self.default, self.written = default, written

    def load(self, config: Table) -> dict[str, Any]:
        return {self.ours[0]: get(config, self.theirs, self.default)}

    def save(self, settings: Table) -> dict[str, Any]:
        return {self.theirs[0]: settings[self.ours[0]]} if self.written else {}


def same(**names: str) -> tuple[Rule, ...]:
    """A :class:`Same` for each setting and its one key, which config.json must have."""
    return tuple(Same(ours, theirs) for ours, theirs in names.items())


class Choice(Rule):
    """A key each of whose values means some settings; of several with equal settings the first is written."""

    def __init__(self, key: str, options: Mapping[Any, Table], default: Any = REQUIRED) -> None:
        super().__init__((key,), dict.fromkeys(name for option in options.values() for name in option))
        self.options, self.default = options, default

    def load(self, config: Table) -> dict[str, Any]:
        value = get(config, self.theirs, self.default)
        if not isinstance(value, str | bool | int) or value not in self.options:
            raise refuse(self.theirs[0], value, f"which cannot be represented; known: {list(self.options)}")
        return dict(self.options[value])

    def save(self, settings: Table) -> dict[str, Any]:
        for value, option in self.options.items():
            if all(settings[name] == wanted for name, wanted in option.items()):
                return {self.theirs[0]: value}
        found = ", ".join(f"{name} {settings[name]!r:.60}" for name in self.ours)
        raise UserError(f"{found}: none of what {self.theirs[0]} can say: {list(self.options)}")


class Begin(Rule):
    """Settings that a run begins with, and that do not matter to what the weights are."""

    def __init__(self, fixed: Table) -> None:
        super().__init__(ours=fixed)
        self.fixed = fixed

    def load(self, config: Table) -> dict[str, Any]:
        return dict(self.fixed)


class Ours(Begin):
    """Settings that every model of the family has."""

    def save(self, settings: Table) -> dict[str, Any]:
        for name, wanted in self.fixed.items():
            if settings[name] != wanted:
                raise refuse(name, settings[name], f"the family has {wanted!r} alone")
        return {}


class Theirs(Rule):
    """Keys that must have one value, or be absent, as no setting says anything else."""

    def __init__(self, fixed: Table) -> None:
        super().__init__(fixed)
        self.fixed = fixed

    def load(self, config: Table) -> dict[str, Any]:
        for name, wanted in self.fixed.items():
            value = get(config, (name,), wanted)
            if value != wanted:
                raise refuse(name, value, f"which cannot be represented: only {wanted!r} can")
        return {}

    def save(self, settings: Table) -> dict[str, Any]:
        return dict(self.fixed)


class Computed(Rule):
    """Anything else: one function for each direction."""

    def __init__(
        self, theirs: Iterable[str], ours: Iterable[str], load: Callable[[Table], dict[str, Any]],
        save: Callable[[Table], dict[str, Any]],
    ) -> None:  # fmt: skip
        super().__init__(theirs, ours)
        self.load, self.save = load, save  # type: ignore[assignment, method-assign]
