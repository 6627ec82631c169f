"""Rules that only say "A requires B" or "A excludes B": tables with one row per rule, and the function to apply them.

Five columns, separated by tabs; ``#`` starts a comment:

- setting: a condition. The problem names the flag of the first term of the alternative that holds.
- relation: ``requires``, ``excludes``, or ``needs`` (as requires; the problem names the missing flag of the condition).
- condition.
- reason: with ``{field}`` for the value of a field; empty: the relation as text, such as "requires --bf16".
- fix; empty: "add it, or remove this flag" (requires) or "remove one" (excludes); ``-``: none.

A condition consists of alternatives, separated by ``|``, of terms, separated by ``&``. ``field`` holds if its value is
set: not None, False or empty. Others: ``not field``, ``@field`` (the user set it), ``field=a,b`` (one of these),
``field!=a,b``, ``field>1``, ``field:a,b`` (a list with one of these)."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from operator import attrgetter
from typing import NamedTuple

from megatron.core.config.cli import FlagSpec, show
from megatron.core.config.problems import Settings

_TERM = re.compile(r"(not |@)?([\w.]+)(?:(!=|=|>|:)(\S+))?")
_FIXES = {"requires": "add it, or remove this flag", "excludes": "remove one", "needs": "", "-": ""}


class Term(NamedTuple):
    """One comparison of a condition."""

    prefix: str
    field: str
    operator: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Term:
        """Raises ValueError for text that is no term."""
        if (match := _TERM.fullmatch(text)) is None:
            raise ValueError(f"{text!r} is no term of a condition")
        prefix, field, operator, values = match.groups(default="")
        return cls(prefix, field, operator, tuple(values.split(",")) if values else ())

    def holds(self, settings: Settings, explicit: Collection[str]) -> bool:
        """Whether ``settings`` fulfil this term."""
        if self.prefix == "@":
            return self.field in explicit
        value = attrgetter(self.field)(settings)
        if self.operator == ">":
            return value is not None and value > float(self.values[0])
        if self.operator == ":":
            return any(item in self.values for item in value or ())
        if self.operator:
            return (show(value) in self.values) == (self.operator == "=")
        is_set = value is not None and value is not False and value != "" and value != []
        return is_set != bool(self.prefix)

    def text(self, flags: Mapping[str, FlagSpec], settings: Settings, required: bool) -> str:
        """Return the flag with its value: the ``required`` values, else the current one; switches have none."""
        name = flags[self.field].names[0]
        if self.operator in (">", ":") or (self.operator == "=" and required):
            return f"{name} {'> ' * (self.operator == '>')}{' or '.join(self.values)}"
        return f"{name} {show(getattr(settings, self.field))}" if self.operator else name


class Condition(tuple[tuple[Term, ...], ...]):
    """Alternatives of terms that hold together."""

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises ValueError for a wrong term."""
        return cls(tuple(map(Term.parse, terms.split(" & "))) for terms in text.split(" | "))

    def holding(self, settings: Settings, explicit: Collection[str]) -> Iterator[Term]:
        """Yield the first term of each alternative that ``settings`` fulfil."""
        return (terms[0] for terms in self if all(term.holds(settings, explicit) for term in terms))

    def text(self, flags: Mapping[str, FlagSpec], settings: Settings) -> str:
        """Return the condition as text, such as "--bf16 or --fp16"."""
        return " or ".join(" and ".join(term.text(flags, settings, True) for term in terms) for terms in self)


class Row(NamedTuple):
    """One rule."""

    setting: Condition
    relation: str
    condition: Condition
    reason: str
    fix: str


@functools.cache
def read_table(package: str) -> tuple[Row, ...]:
    """Return the rows of ``requirements.tsv`` of ``package``. Raises ValueError for a wrong row."""
    text = (resources.files(package) / "requirements.tsv").read_text(encoding="utf-8")
    cells = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(
        Row(Condition.parse(setting), relation, Condition.parse(condition), reason, _FIXES.get(fix or relation, fix))
        for setting, relation, condition, reason, fix in cells
    )


class Unmet(NamedTuple):
    """A rule that settings do not meet."""

    field: str
    reason: str
    fix: str
    is_missing: bool
    """Whether ``field`` has no value, though another setting needs it."""


class _Values:
    """Values of fields by name, for placeholders of reasons."""

    def __init__(self, settings: object) -> None:
        self.settings = settings

    def __getitem__(self, field: str) -> object:
        value = getattr(self.settings, field)
        return show(value) if isinstance(value, list) else value


def unmet(
    table: Collection[Row], settings: Settings, explicit: Collection[str], flags: Mapping[str, FlagSpec]
) -> Iterator[Unmet]:
    """Yield the rows of ``table`` that ``settings`` do not meet. ``explicit``: fields that the user set."""
    for row in table:
        for term in row.setting.holding(settings, explicit):
            other = next(row.condition.holding(settings, explicit), None)
            if (other is None) == (row.relation == "excludes"):
                continue
            if row.reason:
                reason = row.reason.format_map(_Values(settings))  # type: ignore[arg-type]  # only reads items
            elif other is not None:
                reason = f"contradicts {other.text(flags, settings, False)}"
            elif row.relation == "requires":
                reason = f"requires {row.condition.text(flags, settings)}"
            else:
                reason = f"is required by {term.text(flags, settings, False)}"
            is_missing = row.relation == "needs"
            yield Unmet(row.condition[0][0].field if is_missing else term.field, reason, row.fix, is_missing)
