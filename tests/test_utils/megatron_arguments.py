"""Complete arguments of Megatron-LM's runs, ``None`` included: ``megatron_arguments.tsv``."""

import argparse
import enum
import json
from importlib import import_module
from pathlib import Path

VERSIONS = ("0.9", "0.12", "0.15", "0.17", "0.19", "main")
KINDS = ("dense", "moe", "bert", "t5")
TABLE = Path(__file__).with_suffix(".tsv")


def arguments(version, kind, monkeypatch, **changes):
    """The ``argparse.Namespace`` that a checkpoint of this version and kind of model holds, with ``changes``.

    Classes of Megatron-LM are at their places for the duration of a test, so that pickle can name them.
    """
    values = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, value, runs = line.split("\t")
            if any(_includes(run, version, kind) for run in runs.split()):
                assert name not in values, line
                values[name] = _value(value, monkeypatch)
    return argparse.Namespace(**{**values, **changes})


def _includes(run, version, kind):
    span, _, kinds = run.partition(":")
    first, _, last = span.partition("..")
    inside = VERSIONS.index(first) <= VERSIONS.index(version) <= VERSIONS.index(last or first)
    return inside and kind in (kinds.split(",") if kinds else KINDS)


def _value(text, monkeypatch):
    if not text.startswith("!"):
        return json.loads(text)
    full, _, number = text[1:].partition(" ")
    module, _, name = full.rpartition(".")
    place = import_module(module)
    if module.startswith("megatron."):
        monkeypatch.setattr(place, name, enum.IntEnum(name, {"value": int(number)}, module=module), raising=False)
    result = getattr(place, name)
    return result(int(number)) if number else result
