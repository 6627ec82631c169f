"""The help of every tool shows the default of every option."""

import argparse
import sys
from collections.abc import Sequence

import pytest

from megatron.console import TOOLS, run_tool


def has_default(action):
    default = action.default
    empty = default is None or isinstance(default, bool) or (isinstance(default, Sequence) and not default)
    return bool(action.option_strings) and default is not argparse.SUPPRESS and not empty


def option_texts(text):
    """The help text of each option, by its first name, on one line."""
    texts, name = {}, ""
    for line in text.splitlines():
        words = line.split()
        name = name if words else ""
        if line.startswith("  -") and words[0].startswith("-"):
            name = words[0].rstrip(",")
        if name and line.startswith("  "):
            texts[name] = f"{texts.get(name, '')} {' '.join(words)}"
    return texts


@pytest.mark.parametrize("name", TOOLS)
def test_help_shows_defaults(name, monkeypatch, capsys):
    """The help of draw-schedule lists a part of the flags of training."""
    monkeypatch.setattr(sys, "argv", [f"megatron {name}", "--help"])
    parsers, print_help = [], argparse.ArgumentParser.print_help

    def recorded(parser, file=None):
        parsers.append(parser)
        print_help(parser, file)

    monkeypatch.setattr(argparse.ArgumentParser, "print_help", recorded)
    with pytest.raises(SystemExit) as end:
        run_tool(name, ["--help"])
    assert end.value.code in (0, None)
    (parser,) = parsers
    texts = option_texts(capsys.readouterr().out)
    checked = 0
    for action in filter(has_default, parser._actions):
        if action.option_strings[0] not in texts:
            assert action.help is argparse.SUPPRESS or name == "draw-schedule", action.option_strings
            continue
        values = action.default if isinstance(action.default, list | tuple) else [action.default]
        bracket = f"[{' '.join(str(getattr(value, 'name', value)) for value in values)}]"
        text = texts[action.option_strings[0]]
        assert text.endswith(bracket) or "default:" in text, (text, bracket)
        assert not text.removesuffix(bracket).rstrip().endswith(("]", f"({bracket[1:-1]})")), f"twice: {text}"
        checked += 1
    assert checked or name in ("check-data", "merge-data", "report", "sft", "dpo", "distill")  # without defaults
