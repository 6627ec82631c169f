"""Dataclass fields become flags, and every mistake on a command line is found at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from megatron.core.config.cli import (
    ConfigError,
    Problem,
    derived,
    flag,
    flag_table,
    flatten,
    group_flags,
    make_parser,
    read_mapping,
    read_segments,
    report,
    segments,
    suggestion,
)


def parse_pair(text: str) -> tuple[int, ...]:
    left, right = text.split(",")
    return int(left), int(right)


@dataclass(kw_only=True)
class Sizes:
    """Sizes of things"""

    width: int | None = None
    """How wide."""

    depth: int = flag()
    """How deep; filled in later."""

    rate: float = 1e-3
    """How fast, in 100% of cases."""

    color: Literal["red", "green"] = "red"
    """Which color."""

    level: Literal[0, 1, 2] = 0
    """Which level."""

    fast: bool = False
    """Be fast."""

    fusion: bool = True
    """Fused kernel."""

    bias: bool = flag("--disable-bias", default=True, on="--bias")
    """No bias."""

    paths: list[str] | None = None
    """Where."""

    ramp: list[int] | None = flag("--ramp", nargs=3)
    """Three numbers."""

    anything: list[str] | None = flag("--anything", nargs="*")
    """Any number of words."""

    pair: tuple[int, ...] | None = flag("--pair", parse=parse_pair)
    """Two numbers."""

    odd_name: bool = flag("--odd_na-me", default=False)
    """Both dashes in one name."""

    total: int = derived(0)
    """Not a flag."""


SPECS = group_flags(Sizes)


def read(text):
    result, problems = segments(text.split())
    values, more = read_segments(SPECS, result)
    return values, [str(problem) for problem in problems + more]


def values_of(text):
    values, problems = read(text)
    assert problems == []
    return values


def problem_of(text):
    _, problems = read(text)
    assert len(problems) == 1, problems
    return problems[0]


def test_every_kind_of_value_is_converted():
    text = "--width 3 --rate 1e-4 --color green --level 2 --fast --fusion".replace(" --fusion", " --no-fusion")
    assert values_of(text) == {
        "width": 3, "rate": 1e-4, "color": "green", "level": 2, "fast": True, "fusion": False,
    }  # fmt: skip
    assert values_of("--paths a b --ramp 1 2 3 --anything --pair 127,-1") == {
        "paths": ["a", "b"], "ramp": [1, 2, 3], "anything": [], "pair": (127, -1),
    }  # fmt: skip


def test_negative_numbers_are_values():
    assert values_of("--width -1 --rate -1e-3") == {"width": -1, "rate": -1e-3}


@pytest.mark.parametrize("name", ["--odd_na-me", "--odd-na-me", "--odd-na_me", "--odd_na_me"])
def test_dash_and_underscore_are_the_same(name):
    assert values_of(name) == {"odd_name": True}


def test_equals_sign_attaches_a_value():
    assert values_of("--width=3 --paths=a_b=c") == {"width": 3, "paths": ["a_b=c"]}


def test_last_of_repeated_flags_wins():
    assert values_of("--width 3 --width 4 --disable-bias --bias") == {"width": 4, "bias": True}


def test_names_are_not_abbreviated():
    assert problem_of("--widt 3") == "--widt: unknown flag; did you mean --width?"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--width", "--width: needs a value"),
        ("--width x", "--width x: is not an integer"),
        ("--width 1 2", "--width 1 2: takes one value, got 2"),
        ("--rate fast", "--rate fast: is not a number"),
        ("--rate nan", "--rate nan: must be a finite number"),
        ("--color gren", "--color gren: must be one of red, green; did you mean green?"),
        ("--level 3", "--level 3: must be one of 0, 1, 2; did you mean"),
        ("--fast true", "--fast true: takes no value: pass only the flag, or remove it"),
        ("--ramp 1 2", "--ramp 1 2: takes 3 values, got 2"),
        ("--paths", "--paths: needs at least one value"),
        ("--pair 1", "--pair 1: not enough values"),
        ("--total 3", "--total: unknown flag"),
        ("3 --fast", "3: is not a flag"),
        ("--width=3 4", "4: is not a flag"),
    ],
)
def test_mistake_is_explained(text, problem):
    assert problem_of(text).startswith(problem.removesuffix("; did you mean"))


def test_all_mistakes_are_found_at_once():
    values, problems = read("x --width y --colour red --fast 1 --rate 0.5")
    assert len(problems) == 4 and values == {"rate": 0.5}


def test_help_is_the_docstring_of_the_field():
    table = flag_table(SPECS)
    assert table["--width"].help == "How wide." and table["--no-fusion"].help == "Disable: fused kernel."


def test_parser_shows_group_choices_and_default():
    text = make_parser(SPECS, "program").format_help()
    for part in (
        "Sizes of things:",
        "--color {red,green}",
        "Which color. [red]",
        "in 100% of cases. [0.001]",
        "--no-fusion",
    ):
        assert part in text
    assert "--total" not in text


def test_parser_reads_like_the_scanner():
    text = "--width 3 --rate 1e-4 --color green --no-fusion --paths a b --ramp 1 2 3 --pair 1,2 --fast"
    parsed = vars(make_parser(SPECS, "program").parse_args(text.split()))
    assert {name: parsed[name] for name in values_of(text)} == values_of(text)


def test_file_settings_take_field_and_flag_names():
    content = {"group": {"width": 3, "disable-bias": True}, "no_fusion": False, "rate": "1e-4", "ramp": [1, 2, 3]}
    values, problems = read_mapping(SPECS, content)
    assert not problems
    assert values == {"width": 3, "bias": False, "fusion": True, "rate": 1e-4, "ramp": [1, 2, 3]}
    assert read_mapping(SPECS, {"bias": False, "paths": "a", "width": None, "pair": "1,2"})[0] == {
        "bias": False, "paths": ["a"], "width": None, "pair": (1, 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"widht": 3}, "widht 3: unknown setting; did you mean width?"),
        ({"fast": 1}, "fast 1: must be true or false"),
        ({"width": "x"}, "width x: is not an integer"),
        ({"rate": None}, "rate None: needs a value"),
        ({"ramp": [1]}, "ramp 1: takes 3 values, got 1"),
        ({"color": "blue"}, "color blue: must be one of red, green"),
        ({"width": 3.5}, "width 3.5: is not an integer"),
    ],
)
def test_file_mistake_is_explained(content, problem):
    values, problems = read_mapping(SPECS, content)
    assert values == {} and [str(item) for item in problems] == [problem]


def test_renamed_keys_hold_in_files():
    assert read_mapping(SPECS, {"breadth": 3}, {"--breadth": "--width"})[0] == {"width": 3}


def test_flatten_drops_the_path():
    assert list(flatten({"a": {"b": {"c": 1}}, "d": 2})) == [("c", 1), ("d", 2)]


def test_suggestion_completes_prefixes():
    assert suggestion("--tensor-model", ["--tensor-model-parallel-size", "--width"]) == (
        "did you mean --tensor-model-parallel-size?"
    )
    assert suggestion("--zzz", ["--width"]) == "see --help"


def test_error_prints_one_line_per_problem(capsys):
    error = ConfigError([Problem("--width", "is too small", 3, "give 4"), Problem("--fast", "is not")])
    assert str(error) == "--width 3: is too small; give 4\n--fast: is not"
    report(error, "program")
    assert capsys.readouterr().err.splitlines()[0] == "program: 2 problems with the settings"


def test_field_types_that_cannot_be_flags_are_rejected():
    @dataclass(kw_only=True)
    class Wrong:
        """Wrong"""

        table: dict[str, int] | None = None

    Wrong.__annotations__["table"] = dict
    with pytest.raises(TypeError, match="needs flag"):
        group_flags(Wrong)
