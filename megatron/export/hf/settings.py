"""Bidirectional rules between ``config.json`` and command-line settings. Torch-free.

A rule declares the keys and settings that it reads, so that unread ones are rejected instead of ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.core.config.errors import UserError

Table = Mapping[str, Any]
REQUIRED = object()
"""Default of a key that config.json must have."""


def refuse(name: str, value: object, reason: str) -> UserError:
    """Build (do not raise) the error for an unsupported key of config.json or setting."""
    return UserError(f"{name} is {value!r:.200}, {reason}")


def get(config: Table, names: Iterable[str], default: object = REQUIRED) -> Any:
    """Return the first value that is not null; else ``default`` (called if it is a function)."""
    names = tuple(names)
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is REQUIRED:
        raise UserError(f"config.json: {names[0]} is missing")
    return default(config) if callable(default) else default


class Rule:
    """Conversion between keys of ``config.json`` (``hf_keys``) and equivalent settings (``settings``)."""

    limits: tuple[str, ...] = ()
    """Convertible values of keys with restrictions, as Markdown for the reference page."""

    def __init__(self, hf_keys: Iterable[str] = (), settings: Iterable[str] = ()) -> None:
        self.hf_keys, self.settings = tuple(hf_keys), tuple(settings)

    def load(self, config: Table) -> dict[str, object]:
        """Convert config.json to settings; raise ``UserError`` for values that settings cannot represent."""
        return {}

    def save(self, settings: Table) -> dict[str, object]:
        """Convert settings to keys of config.json; raise ``UserError`` for settings that the family lacks."""
        return {}


def limit(key: str, values: Iterable[object]) -> str:
    """Format the only convertible values of a key as Markdown."""
    return f"`{key}`: {', '.join(f'`{json.dumps(value)}`' for value in values)}"


class Ignored(Rule):
    """Keys that do not affect the model's output."""


class Same(Rule):
    """One value with a setting name and HF ``keys``; export writes the first key.

    Args:
        default: value of an absent key, or a function of config.json.
        written: whether export writes the key; False if another rule writes it."""

    def __init__(self, setting: str, *keys: str, default: object = REQUIRED, written: bool = True) -> None:
        super().__init__(keys, (setting,))
        self.default, self.written = default, written

    def load(self, config: Table) -> dict[str, Any]:
        return {self.settings[0]: get(config, self.hf_keys, self.default)}

    def save(self, settings: Table) -> dict[str, object]:
        return {self.hf_keys[0]: settings[self.settings[0]]} if self.written else {}


def same(**names: str) -> tuple[Rule, ...]:
    """Return a :class:`Same` for each setting and its required key."""
    return tuple(Same(setting, key) for setting, key in names.items())


class Choice(Rule):
    """A key whose values each map to settings; of several matches export writes the default, or the first."""

    def __init__(self, key: str, options: Mapping[Any, Table], default: object = REQUIRED) -> None:
        super().__init__((key,), dict.fromkeys(name for option in options.values() for name in option))
        self.options, self.default = options, default
        if {*options} != {True, False}:
            self.limits = (limit(key, options),)

    def load(self, config: Table) -> dict[str, object]:
        value = get(config, self.hf_keys, self.default)
        if not isinstance(value, str | bool | int) or value not in self.options:
            raise refuse(self.hf_keys[0], value, f"which cannot be represented; known: {list(self.options)}")
        return dict(self.options[value])

    def save(self, settings: Table) -> dict[str, object]:
        fitting = [
            value
            for value, option in self.options.items()
            if all(settings[name] == required for name, required in option.items())
        ]
        if fitting:
            return {self.hf_keys[0]: self.default if self.default in fitting else fitting[0]}
        values = ", ".join(f"{name} {settings[name]!r:.60}" for name in self.settings)
        raise UserError(f"{values}: not a value of {self.hf_keys[0]}, which has {list(self.options)}")


class Begin(Rule):
    """Settings with an initial value on import; export accepts any value."""

    def __init__(self, fixed: Table) -> None:
        super().__init__(settings=fixed)
        self.fixed = fixed

    def load(self, config: Table) -> dict[str, object]:
        return dict(self.fixed)


class Fixed(Begin):
    """Settings with one fixed value in the family; export rejects others."""

    def save(self, settings: Table) -> dict[str, object]:
        problems = [
            refuse(name, settings[name], f"the family has {value!r} alone")
            for name, value in self.fixed.items()
            if settings[name] != value
        ]
        if problems:
            raise UserError("; ".join(map(str, problems)))
        return {}


class FixedKeys(Rule):
    """Keys that must be absent or have one value, because no setting represents others. ``written``: whether export
    writes them; False for keys that ``transformers`` ignores."""

    def __init__(self, fixed: Table, *, written: bool = True) -> None:
        super().__init__(fixed)
        self.fixed, self.written = fixed, written
        self.limits = tuple(limit(key, [value]) for key, value in fixed.items())

    def load(self, config: Table) -> dict[str, object]:
        for name, fixed_value in self.fixed.items():
            value = get(config, (name,), fixed_value)
            if value != fixed_value:
                raise refuse(name, value, f"which cannot be represented: only {fixed_value!r} can")
        return {}

    def save(self, settings: Table) -> dict[str, object]:
        return dict(self.fixed) if self.written else {}


class Computed(Rule):
    """Custom rule with one function per direction."""

    def __init__(
        self,
        hf_keys: Iterable[str],
        settings: Iterable[str],
        load: Callable[[Table], dict[str, object]],
        save: Callable[[Table], dict[str, object]],
        limits: tuple[str, ...] = (),
    ) -> None:
        super().__init__(hf_keys, settings)
        self.limits = limits
        self.load, self.save = load, save  # type: ignore[assignment, method-assign]
