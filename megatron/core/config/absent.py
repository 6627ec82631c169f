"""Flags and settings without a field: the table ``absent.tsv`` holds the answer to each of them.

Each row has five columns, separated by tabs: spellings (``--flag=value``: only that value; empty if only programs
name it), status, number of values (empty: a switch; ``int>=1``: one integer of at least 1), ``setting=default``,
answer. The status is one of

- ``not yet``: a capability that does not exist; rejected unless left at its default. The answer names the capability.
- ``no effect``: accepted, with one notice that gives the answer.
- ``means``: an older spelling, read as the flags of the answer, in which ``*`` stands for its values.
- ``retired``: rejected; the answer is the replacement.
- ``other``: a flag of another program; the answer names the program, then the replacement.
- ``foreign``: Megatron-LM has this flag and this library has not. ``removed``: Megatron-LM had it.

When a capability is built its row is deleted and a field is added; nothing else changes. Standard library only."""

from __future__ import annotations

import ast
import functools
from abc import ABCMeta
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.core.config import cli
from megatron.core.config.ranges import INT64_MAX, Range

OPERANDS = "*"
LEAVE_OUT = "remove it"
FOREIGN = "exists in Megatron-LM, is not available here"


@dataclass(frozen=True)
class Absent:
    """One row of the table."""

    names: tuple[str, ...]
    status: str
    nargs: str
    settings: dict[str, object]
    answer: str

    @property
    def meaning(self) -> str:
        """Return the text of this row for the flag reference and for notices."""
        if self.status == "not yet":
            return f"{self.answer} not available yet"
        if self.status == "no effect":
            return f"accepted without effect: {self.answer}"
        if self.status == "means":
            return "means " + " ".join("..." if token == OPERANDS else token for token in self.answer.split())
        program, _, fix = self.answer.partition(": ")
        return f"rejected: {fix} (a flag of {program})" if self.status == "other" else f"rejected: {self.answer}"

    def refusal(self, typed: str) -> cli.Problem:
        """Return the problem of a flag that is always rejected; ``typed``: the flag as the user wrote it."""
        if self.status == "other":
            program, _, fix = self.answer.partition(": ")
            return cli.Problem(typed, f"is a flag of {program}", fix=fix)
        reason = {
            "retired": "is not a flag any more",
            "foreign": FOREIGN,
            "removed": "was removed from Megatron-LM",
        }[self.status]
        return cli.Problem(typed, reason, fix=self.answer or LEAVE_OUT)


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # TypeError: {[]: 1}
        return text


def _row(line: str) -> Absent:
    names, status, nargs, settings, answer = line.split("\t")
    pairs = (setting.split("=") for setting in settings.split())
    return Absent(tuple(names.split()), status, nargs, {name: _value(default) for name, default in pairs}, answer)


@functools.cache
def rows() -> tuple[Absent, ...]:
    """The table."""
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    return tuple(_row(line) for line in lines if not line.startswith("#"))


@functools.cache
def by_name() -> dict[str, Absent]:
    """Rows by normalized spelling: ``-`` for ``_``, lower case but for values."""
    return {name: row for row in rows() for name in row.names}


@functools.cache
def settings() -> dict[str, Absent]:
    """Rows by the name that programs give to the setting."""
    return {name: row for row in rows() for name in row.settings}


def _answer_to(row: Absent, value: object) -> Absent:
    return by_name().get(f"{row.names[0]}={value}", row) if row.names else row


def _spec(row: Absent) -> cli.FlagSpec:
    """An integer with a lower bound, values of any type, or a switch, with the default of the row."""
    field = next(iter(row.settings), row.names[0])  # without a setting, the spelling is the field
    default = row.settings.get(field)
    if row.nargs.startswith("int"):
        low = int(row.nargs.partition(">=")[2] or -INT64_MAX)
        return cli.FlagSpec(
            field, row.names, default, int, "int", (), None, True, None, None, Range(low, INT64_MAX), None, Absent
        )
    nargs = None if row.nargs in ("", "1") else row.nargs
    on = next((name for name in row.names if default is True and name[2:].replace("-", "_") == field), None)
    return cli.FlagSpec(
        field=field,
        names=tuple(name for name in row.names if name != on),
        default=default,
        convert=_value,
        type_name="custom" if row.nargs else "bool",
        choices=(),
        nargs=nargs,
        optional=True,
        metavar=None,
        on=on,
        range=None,
        verify=None,
        group=Absent,
    )


@functools.cache
def specs() -> tuple[cli.FlagSpec, ...]:
    """Return the flags that are read, and then rejected or accepted without effect."""
    accepted = (row for row in rows() if row.status in ("not yet", "no effect") and row.names)
    return tuple(_spec(row) for row in accepted if "=" not in row.names[0])


@functools.cache
def renamed() -> dict[str, str]:
    """Plain renames, which hold in files too."""
    older = {name: row.answer.split() for row in rows() if row.status == "means" for name in row.names}
    return {name: tokens[0] for name, tokens in older.items() if tokens[1:] == [OPERANDS]}


def rewrite(
    command_line: list[cli.Segment], current: Container[str]
) -> tuple[list[cli.Segment], list[str], list[cli.Problem]]:
    """Replace older spellings of a command line by today's flags. ``current`` spellings are not changed, except for
    values that the table has. Replacements go to the front, so that today's spelling wins where both are given. Returns
    (the command line in today's flags, one notice per spelling or value that is read otherwise, the problems of
    rejected flags and values). Rows of the table without a replacement stay, for :func:`answers`."""
    front: list[list[str]] = []
    unchanged: list[cli.Segment] = []
    notices: list[str] = []
    problems: list[cli.Problem] = []
    for segment in command_line:
        name = segment.name.lower()
        of_value = by_name().get(f"{name}={' '.join(segment.operands)}")
        row = of_value or (None if segment.name in current else by_name().get(name))
        if row is None:
            unchanged.append(segment)
        elif row.status == "means":
            notices.append(f"{' '.join(segment.tokens) if of_value else segment.typed} {row.meaning}")
            front.append(
                [word for token in row.answer.split() for word in (segment.operands if token == OPERANDS else [token])]
            )
        elif row.status not in ("not yet", "no effect"):
            problems.append(row.refusal(segment.typed))
        elif of_value is None:
            unchanged.append(replace(segment, typed=name))
        elif row.status == "not yet":
            reason = f"{row.answer} not available yet"
            problems.append(cli.Problem(segment.typed, reason, segment.operands[0], LEAVE_OUT))
        else:
            notices.append(f"{' '.join(segment.tokens)} {row.meaning}")
    # names that set several flags come first, so that --activations-checkpoint-num-layers 4 applies in any order
    first, bad_operands = cli.segments([token for tokens in sorted(front, key=len, reverse=True) for token in tokens])
    return first + unchanged, notices, problems + bad_operands


def answers(values: Mapping[str, object]) -> tuple[list[str], list[cli.Problem]]:
    """Return (notices, problems) for the settings of this table among ``values``, unless default."""
    notices: list[str] = []
    problems: list[cli.Problem] = []
    for spec in specs():
        if spec.field not in values or values[spec.field] == spec.default:
            continue
        row = _answer_to(by_name()[spec.names[0]], values[spec.field])
        if row.status == "not yet":
            details = {} if spec.is_bool else {"value": values[spec.field]}
            problems.append(cli.Problem(spec.names[0], f"{row.answer} not available yet", fix=LEAVE_OUT, **details))
        else:
            notices.append(f"{spec.names[0]} {row.meaning}")
    return notices, problems


def defaults() -> dict[str, object]:
    """Return the values that a program reads for settings without a field: every capability is off."""
    foreign = (name[2:].replace("-", "_") for row in rows() if row.status == "foreign" for name in row.names)
    return dict.fromkeys(foreign) | {name: row.settings[name] for name, row in settings().items()}


def explain(problem: cli.Problem, names_in_use: Iterable[str]) -> cli.Problem:
    """Return the problem of an unknown flag with the likeliest spelling as fix: existing flags first, because older
    spellings are rarely meant. Rejected flags are not suggested."""
    name = cli.normalize(problem.flag)
    if name in MEANT:
        return replace(problem, fix=MEANT[name])
    rejected = {spelling for row in rows() if row.status not in ("means", "no effect") for spelling in row.names}
    older = [older for row in rows() if row.status == "means" for older in row.names if "=" not in older]
    candidates = (
        cli.suggestion(name, names) for names in ([name for name in names_in_use if name not in rejected], older)
    )
    fix = next((candidate for candidate in candidates if candidate != cli.NO_SUGGESTION), cli.NO_SUGGESTION)
    return replace(problem, fix=fix)


MEANT = {
    "--config": "did you mean --yaml-cfg FILE?",
    "--config-file": "did you mean --yaml-cfg FILE?",
    "--resume": "did you mean --load DIRECTORY?",
    "--resume-from-checkpoint": "did you mean --load DIRECTORY?",
    "--model-name": "the program names the model family; --load-hf FOLDER takes a Hugging Face model",
    "--model-name-or-path": "did you mean --load-hf FOLDER?",
    "--output-dir": "did you mean --save DIRECTORY?",
}
"""Names of other programs' flags -> what they mean here, where no flag is spelled alike."""


class TakesSettings(ABCMeta):
    """Metaclass of a library configuration: the constructor takes, and objects have, the settings of this table by
    Megatron-LM's names. Raises ConfigError for a missing capability, unless it is off or at its default. Subclasses
    can have abstract bases too."""

    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        if not any(isinstance(base, TakesSettings) for base in bases):
            for setting, row in settings().items():
                if setting not in members.get("__annotations__", {}):
                    setattr(cls, setting, row.settings[setting])

    def in_our_words(cls, settings: dict[str, object]) -> dict[str, object]:
        """The constructor's arguments in this library's words; a class may say what else they mean."""
        return settings

    def __call__(cls, *args: object, **settings: object) -> object:
        """Create an object of ``cls``, also from settings of Megatron-LM: settings that exist only there must have
        their default value (ConfigError otherwise) and become attributes of the object."""
        settings = cls.in_our_words(settings)
        fields_here = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        rest = {name: settings.pop(name) for name in sorted(settings.keys() & defaults().keys() - fields_here)}
        if problems := rejected_settings(rest):
            raise cli.ConfigError(problems)
        instance = super().__call__(*args, **settings)
        vars(instance).update(rest)
        return instance


def rejected_settings(values: Mapping[str, object]) -> list[cli.Problem]:
    """Return a problem for each setting of the table in ``values`` that exists only in Megatron-LM and is not at its
    default."""
    return [problem for name in sorted(values.keys() & defaults().keys()) for problem in _rejected(name, values[name])]


def _rejected(name: str, value: object) -> Iterator[cli.Problem]:
    """Yield a problem if ``name``, which has no field here, has a value other than its default; for names that only
    command lines have, any true value. Rows without effect pass."""
    row = settings().get(name)
    if row is None:
        if value:
            yield cli.Problem(name, FOREIGN, value, LEAVE_OUT)
        return
    default, row = row.settings[name], _answer_to(row, value)
    if value is None or value == default:
        return
    if row.status == "not yet":
        yield cli.Problem(name, f"{row.answer} not available yet", value, LEAVE_OUT)
    elif row.status == "foreign":
        yield cli.Problem(name, FOREIGN, value, row.answer or LEAVE_OUT)
