"""Dataclass fields as command-line flags, standard library only.

A field is a flag: its annotation gives the type and the choices, its default the default, the string literal below it
the help text. ``name: bool = False`` becomes ``--name``, ``name: bool = True`` becomes ``--no-name``, everything else
takes values; :func:`flag` states what is irregular. Names accept both ``-`` and ``_``, are never abbreviated, and
``--name=value`` works. Scanning collects every mistake of a command line instead of stopping at the first one, which is
why argparse is used only for ``--help`` and for the flags that third-party scripts add."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.config.commands import as_typed, help_with_default
from megatron.core.config.errors import UserError
from megatron.core.config.ranges import Range

_UNSET: Any = dataclasses.MISSING
_NO_VALUE: object = object()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the settings: which flag, its value, why, and what to do."""

    flag: str
    reason: str
    value: object = _NO_VALUE
    fix: str = ""

    def __str__(self) -> str:
        value = "" if self.value is _NO_VALUE else f" {_clipped(show(self.value))}"
        return f"{self.flag}{value}: {_clipped(self.reason, 400)}" + (f"; {self.fix}" if self.fix else "")


class ConfigError(UserError):
    """Every problem of a configuration at once; ``str()`` is one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def _clipped(text: str, most: int = 200) -> str:
    """A mistyped value may be a whole file."""
    return text if len(text) <= most else f"{text[: most - 50]} ... ({len(text)} characters)"


def show(value: object) -> str:
    """A value the way a user would type it."""
    if isinstance(value, list | tuple):
        return " ".join(show(item) for item in value) or "(empty)"
    return getattr(value, "name", None) or str(value)


def flag(
    *names: str,
    default: object = None,
    default_factory: Callable[[], object] | None = None,
    nargs: int | str | None = None,
    parse: Callable[[str], object] | None = None,
    metavar: str | None = None,
    on: str | None = None,
    check: Callable[[Any], object] | None = None,
    suggestions: Mapping[str, str] | None = None,
) -> Any:
    """Return a dataclass field whose flag is irregular.

    ``name: int = flag()`` is an ordinary flag that starts as None but is annotated with the type it has once the
    configuration is resolved, so that the code that reads it need not ask.

    Args:
        names: spellings, the first one being the official one; default: from the field's name.
        default, default_factory: as of ``dataclasses.field``; the factory wins.
        nargs: as argparse's: a count, ``"+"`` or ``"*"``.
        parse: from the text on the command line to the value; raises ``ValueError`` with the reason.
        metavar: placeholder of the value in ``--help``.
        on: a further spelling that sets a default-true boolean to True.
        check: raises ``ValueError`` with the reason for a text that no other setting could make sensible.
        suggestions: choice to suggest for names that other programs use, in lower case."""
    metadata = {
        "names": names,
        "nargs": nargs,
        "parse": parse,
        "metavar": metavar,
        "on": on,
        "check": check,
        "suggestions": suggestions,
    }
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived(default: Any = _UNSET, factory: Callable[[], object] = _UNSET) -> Any:
    """A dataclass field that follows from others and has no flag."""
    return dataclasses.field(default=default, default_factory=factory, metadata={"flag": False})


@dataclass(frozen=True)
class FlagSpec:
    """Spelling, conversion and help of one field."""

    field: str
    names: tuple[str, ...]
    default: object
    convert: Callable[[str], object]
    type_name: str
    choices: tuple[object, ...]
    nargs: int | str | None
    optional: bool
    metavar: str | None
    on: str | None
    range: Range | None
    verify: Callable[[str], object] | None
    group: type
    suggestions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Choice to suggest for names that other programs use, in lower case."""

    @property
    def is_bool(self) -> bool:
        return self.type_name == "bool"

    @functools.cached_property
    def spellings(self) -> tuple[str, ...]:
        """Normalized names, ``on`` included."""
        return tuple(map(normalize, (*self.names, *([self.on] if self.on else []))))

    @property
    def help(self) -> str:
        """Docstring of the field on one line, after ``Disable:`` for a switch that is on by default."""
        text = " ".join(field_docs(self.group).get(self.field, "").split())
        return f"Disable: {text[:1].lower()}{text[1:]}" if self.is_bool and self.default is True else text

    def check(self, value: Any) -> object:
        """Return ``value``, converted earlier, after checks of choices, the field's check and the range. Raises
        ValueError, with the nearest choice if there is one."""
        if self.choices and value not in self.choices:
            by_name = {str(choice).lower(): choice for choice in self.choices}
            close = difflib.get_close_matches(str(value).lower(), by_name, n=1)
            hint = f"; did you mean {by_name[close[0]]}?" if close else ""
            if (suggested := self.suggestions.get(str(value).lower())) is not None:
                hint = f"; use {suggested}"
            raise ValueError(f"must be one of {', '.join(map(str, self.choices))}{hint}")
        if self.verify is not None:
            self.verify(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be a finite number")
        if self.range is not None and (reason := self.range.reason(value)):
            raise ValueError(reason)
        return value

    def refusal(self, value: object) -> str:
        """Return why a value (or item of a list) that a program set is invalid; empty if it is valid or None."""
        try:
            for item in value if isinstance(value, list) and self.nargs is not None else [value]:
                if item is not None:
                    self.check(item)
        except (ValueError, TypeError) as error:  # TypeError: a value of another type
            return str(error)
        return ""

    def problem(self, value: object, reason: str, fix: str = "") -> Problem:
        """Return a problem of this flag with its value, which switches and unset flags do not show."""
        return Problem(self.names[0], reason, _NO_VALUE if self.is_bool or value is None else value, fix)

    def from_text(self, text: str) -> object:
        """Convert one operand to the field's type and check it. Raises ValueError with the reason."""
        try:
            value = self.convert(text)
        except ValueError as error:
            reasons = {"int": "is not an integer", "float": "is not a number"}
            raise ValueError(reasons.get(self.type_name, str(error))) from None
        return self.check(value)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return {field: string literal below it} of a dataclass; empty if the source is not available."""
    try:
        tree = ast.parse(inspect.cleandoc(inspect.getsource(cls)) if cls.__module__ == "__main__" else _source(cls))
    except (OSError, TypeError, SyntaxError):
        return {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return {
                statement.target.id: text.value.value
                for statement, text in zip(node.body, node.body[1:])
                if isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    return {}


def _source(cls: type) -> str:
    with open(inspect.getsourcefile(cls) or "", encoding="utf-8") as file:
        return file.read()


def _annotated_range(annotation: Any) -> Range | None:
    if get_origin(annotation) is Annotated:
        return next((extra for extra in annotation.__metadata__ if isinstance(extra, Range)), None)
    return next((inner for part in get_args(annotation) if (inner := _annotated_range(part))), None)


def _plain(annotation: object) -> object:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _scalar(annotation: object) -> tuple[Callable[[str], object], str, tuple[Any, ...]]:
    """Return (converter from text, type name, choices) of an annotation; TypeError for other types."""
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return type(choices[0]), type(choices[0]).__name__, choices
    if annotation in (int, float, str, bool):
        return annotation, annotation.__name__, ()
    raise TypeError(f"a field of type {annotation} needs flag(parse=...)")


def _spec(cls: type, field: dataclasses.Field, annotation: object) -> FlagSpec:
    """Raises TypeError for a bool without default."""
    meta = field.metadata
    default: object = field.default_factory() if callable(field.default_factory) else field.default
    nargs, optional, valid = meta.get("nargs"), False, _annotated_range(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not types.NoneType]
        optional = len(members) < len(get_args(annotation))
        annotation = members[0] if len(members) == 1 else annotation
    convert: Callable[[str], object]
    if parse := meta.get("parse"):
        convert, type_name, choices = parse, "custom", ()
    else:
        if get_origin(annotation) is list:
            nargs, annotation = nargs or "+", get_args(annotation)[0]
        convert, type_name, choices = _scalar(_plain(annotation))
    if type_name == "bool" and not isinstance(default, bool):
        raise TypeError(f"{cls.__name__}.{field.name} needs the default True or False")
    optional = optional or default is None
    spelled = field.name.replace("_", "-")
    names = meta.get("names") or ((f"--no-{spelled}" if type_name == "bool" and default else f"--{spelled}"),)
    return FlagSpec(
        field=field.name,
        names=tuple(names),
        default=default,
        convert=convert,
        type_name=type_name,
        choices=choices,
        nargs=nargs,
        optional=optional,
        metavar=meta.get("metavar"),
        on=meta.get("on"),
        range=valid,
        verify=meta.get("check"),
        group=cls,
        suggestions=meta.get("suggestions") or {},
    )


@functools.cache
def _class_flags(group: type) -> tuple[FlagSpec, ...]:
    names = group.__dict__.get("__annotations__", {})
    members = [field for field in dataclasses.fields(group) if field.name in names and field.metadata.get("flag", True)]
    # without the hints of base classes: families inherit all groups
    annotated = types.SimpleNamespace(__annotations__={field.name: field.type for field in members})
    hints = get_type_hints(annotated, vars(sys.modules[group.__module__]), include_extras=True)
    return tuple(_spec(group, field, hints[field.name]) for field in members)


def group_flags(*groups: type) -> tuple[FlagSpec, ...]:
    """Return the flags of these dataclasses, without inherited fields and those marked ``flag=False``."""
    return tuple(spec for group in groups for spec in _class_flags(group))


def flags_of(kind: type) -> tuple[FlagSpec, ...]:
    """Return the flags of a dataclass and its bases, in the order of ``--help``."""
    return group_flags(*(base for base in kind.__mro__ if "__annotations__" in vars(base) and is_dataclass(base)))


def normalize(name: str) -> str:
    """Return one spelling for ``--a_b`` and ``--a-b``; the part after ``=`` is not changed."""
    return name.replace("_", "-")


@dataclass(frozen=True)
class Segment:
    """A flag as typed and the operands up to the next one; ``attached``: given as ``--flag=value``."""

    typed: str
    operands: tuple[str, ...]
    attached: bool = False

    @property
    def name(self) -> str:
        return normalize(self.typed)

    @property
    def tokens(self) -> list[str]:
        """Return the segment as typed on the command line."""
        return [f"{self.typed}={self.operands[0]}"] if self.attached else [self.typed, *self.operands]


def segments(argv: Sequence[str]) -> tuple[list[Segment], list[Problem]]:
    """Split a command line into flags with their operands; return (segments, problems). An operand before the first
    flag or after ``--flag=value`` is a problem."""
    result: list[Segment] = []
    problems: list[Problem] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            result.append(Segment(name, (value,) if equals else (), bool(equals)))
        elif not result or result[-1].attached:
            problems.append(Problem(token, "is not a flag", fix="every setting is --name value"))
        else:
            result[-1] = dataclasses.replace(result[-1], operands=(*result[-1].operands, token))
    return result, problems


NO_SUGGESTION = "see --help"


def suggestion(name: str, names: Iterable[str]) -> str:
    """``did you mean ...?`` for an unknown name, or :data:`NO_SUGGESTION`."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.75)
    extended = [other for other in names if other.startswith(name)][:3]
    names = list(dict.fromkeys(close[:1] + extended + close[1:]))[:3]
    return f"did you mean {' or '.join(names)}?" if names else NO_SUGGESTION


def _read(spec: FlagSpec, segment: Segment) -> object:
    """Raises ValueError, with the reason, for a wrong number of operands or a wrong value."""
    count = len(segment.operands)
    if spec.is_bool:
        if count:
            raise ValueError("takes no value: pass only the flag, or remove it")
        return True if segment.name == spec.on else not spec.default
    if spec.nargs is None:
        if count != 1:
            raise ValueError("needs a value" if not count else f"takes one value, got {count}")
        return spec.from_text(segment.operands[0])
    if isinstance(spec.nargs, int) and count != spec.nargs:
        raise ValueError(f"takes {spec.nargs} values, got {count}")
    if spec.nargs == "+" and not count:
        raise ValueError("needs at least one value")
    return [spec.from_text(operand) for operand in segment.operands]


def read_segments(specs: Iterable[FlagSpec], command_line: Iterable[Segment]) -> tuple[dict[str, Any], list[Problem]]:
    """Return (values by field that occurs, problems); the last of repeated flags wins."""
    table = flag_table(specs)
    values: dict[str, object] = {}
    problems: list[Problem] = []
    for segment in command_line:
        spec = table.get(segment.name)
        if spec is None:
            problems.append(Problem(segment.typed, "unknown flag", fix=suggestion(segment.name, table)))
            continue
        try:
            values[spec.field] = _read(spec, segment)
        except ValueError as error:
            operands: object = list(segment.operands) if segment.operands else _NO_VALUE
            problems.append(Problem(spec.names[0], str(error), operands))
    return values, problems


def flag_table(specs: Iterable[FlagSpec]) -> dict[str, FlagSpec]:
    """From normalized spelling to flag."""
    return {name: spec for spec in specs for name in spec.spellings}


def flatten(mapping: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield (key, value) of nested groups of settings; the path to a key does not count."""
    for key, value in mapping.items():
        yield from flatten(value) if isinstance(value, Mapping) else [(str(key), value)]


def read_mapping(
    specs: Iterable[FlagSpec], mapping: Mapping[str, object], renamed: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[Problem]]:
    """Return (values by field, problems) of settings from a file, nested tables flattened. Keys are field or flag names
    with ``-`` or ``_``; ``renamed`` maps older flag names. The key of a negative flag (``no_...``) inverts its value.
    Only fields that occur are there; an unknown key, a wrong value, or another value of a field becomes a problem."""
    specs = tuple(specs)
    by_field = {spec.field: spec for spec in specs}
    by_flag = flag_table(specs)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in flatten(mapping):
        name = "--" + normalize(key).lstrip("-")
        name = normalize((renamed or {}).get(name, name))
        spec = by_field.get(name[2:].replace("-", "_")) or by_flag.get(name)
        if spec is None:
            names = [other.replace("_", "-") for other in by_field]
            problems.append(Problem(key, "unknown setting", value, fix=suggestion(name[2:], names)))
            continue
        try:
            negated = spec.is_bool and spec.default and name[2:].replace("-", "_") != spec.field and name != spec.on
            item = from_object(spec, value) ^ bool(negated) if negated else from_object(spec, value)
        except (ValueError, TypeError) as error:
            problems.append(Problem(key, str(error), value))
            continue
        if values.setdefault(spec.field, item) != item:
            problems.append(Problem(key, f"is set twice; before to {values[spec.field]}", value, "keep one of both"))
    return values, problems


def from_object(spec: FlagSpec, value: object) -> Any:
    """Return a value of a settings file in its type, checked like the text on a command line; a single value of a flag
    with ``nargs`` becomes a list. Raises ValueError, with the reason, also for null unless the field is optional."""
    if value is None:
        if not spec.optional:
            raise ValueError("needs a value")
        return None
    if spec.is_bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if spec.nargs is not None:
        items = value if isinstance(value, list) else [value]
        if isinstance(spec.nargs, int) and len(items) != spec.nargs:
            raise ValueError(f"takes {spec.nargs} values, got {len(items)}")
        return [spec.from_text(str(item)) for item in items]
    return spec.from_text(str(value))


def make_parser(specs: Iterable[FlagSpec], prog: str | None = None, description: str = "") -> argparse.ArgumentParser:
    """Return a parser of these flags, for ``--help`` and for scripts that add flags. Names cannot be abbreviated."""
    parser = argparse.ArgumentParser(
        prog=prog, description=as_typed(description), allow_abbrev=False, formatter_class=_HelpFormatter, add_help=False
    )
    parser.add_argument("-h", "--help", action="help", help="Show this and stop.")
    groups: dict[type, Any] = {}
    for spec in specs:
        if spec.group not in groups:
            title = (spec.group.__doc__ or spec.group.__name__).strip().splitlines()[0].rstrip(".")
            groups[spec.group] = parser.add_argument_group(as_typed(title))
        options: dict[str, object] = {"dest": spec.field, "default": spec.default, "help": _help_text(spec)}
        if spec.is_bool:
            options["action"] = "store_false" if spec.default else "store_true"
        else:
            options.update(type=spec.from_text, nargs=spec.nargs, metavar=_metavar(spec))
        groups[spec.group].add_argument(*spec.names, **options)
        if spec.on:
            groups[spec.group].add_argument(spec.on, dest=spec.field, action="store_true", help=argparse.SUPPRESS)
    return parser


def _help_text(spec: FlagSpec) -> str:
    values = f" ({spec.range})" if spec.range is not None and str(spec.range) else ""
    return (as_typed(spec.help) + values).replace("%", "%%")


def _metavar(spec: FlagSpec) -> object:
    """Return the choices in braces, one name per value for a fixed number of values, else the name of the type."""
    if spec.choices:
        return "{" + ",".join(map(str, spec.choices)) + "}"
    names = (spec.metavar or (spec.type_name.upper() if spec.type_name != "custom" else "VALUE")).split()
    if isinstance(spec.nargs, int) and len(names) == spec.nargs:
        return tuple(names)
    return " ".join(names)


class _HelpFormatter(argparse.HelpFormatter):
    """Flag, its values, then the text with its default; no usage line of 300 flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, indent_increment=2, max_help_position=10, width=110)

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # lists keep their lines
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def add_usage(self, usage: object, actions: object, groups: object, prefix: object = None) -> None:
        self._add_item(lambda: f"usage: {self._prog} [--flag value ...]\n\n", [])

    def _get_help_string(self, action: argparse.Action) -> str:
        return help_with_default(action)


def report(error: ConfigError, prog: str = "") -> None:
    """Print every problem to stderr, one line each."""
    prog = prog or sys.argv[0].rpartition("/")[2]
    count = len(error.problems)
    sys.stderr.write(f"{prog}: {count} problem{'s' if count != 1 else ''} with the settings\n")
    sys.stderr.writelines(f"  {as_typed(str(problem))}\n" for problem in error.problems)
