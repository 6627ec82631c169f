"""Published model shapes by name (``models.tsv``), set by ``--model``; programs, planner, help and recipes read them.

A row has name, program, vocabulary size, source and the flags of the model itself: sizes, norms, positions, dropout,
initial deviation, experts. Batches, learning rate, sequence length, precision and layout are the user's."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

from megatron.core.config import cli
from megatron.core.config.cli import FlagSpec, Problem
from megatron.core.models.registry import find_program


class NamedModel(NamedTuple):
    """A published model."""

    name: str
    program: str
    """Name of its pretraining program, such as ``gpt``."""
    vocab_size: int
    source: str
    """Where the shape is published."""
    flags: tuple[str, ...]
    """Command line of the shape, without the vocabulary's size."""


@functools.cache
def named_models() -> dict[str, NamedModel]:
    """Return the rows of ``models.tsv`` by name."""
    text = (resources.files(__package__) / "models.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]
    return {
        name: NamedModel(name, program, int(vocab_size), source, tuple(flags.split()))
        for name, program, vocab_size, source, flags in rows
    }


def model_settings(specs: Sequence[FlagSpec], name: object, family: str) -> tuple[dict[str, object], list[Problem]]:
    """Return (settings of the model ``name`` by field, problems); both empty for None. An unknown name or a model of
    another family than ``family`` is a problem."""
    if name is None:
        return {}, []
    model = named_models().get(str(name))
    if model is None:
        fix = cli.suggestion(str(name), named_models())
        return {}, [Problem("--model", "unknown model", name, fix.replace("see --help", "see --help models"))]
    if find_program(model.program)[0].name != family:
        return {}, [Problem("--model", f"is not a model of this program; use pretrain_{model.program}.py", name)]
    return cli.read_segments(specs, cli.segments(model.flags)[0])


def mock_tokenizer(name: object, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the tokenizer of random tokens for the model ``name``, as settings: its vocabulary, unless ``settings``
    name a tokenizer of another type or a size; empty for None and unknown names."""
    model = named_models().get(str(name))
    if model is None or settings.get("tokenizer_type", "NullTokenizer") != "NullTokenizer":
        return {}
    return {"tokenizer_type": "NullTokenizer", "vocab_size": settings.get("vocab_size") or model.vocab_size}


def models_table() -> str:
    """Return a line per named model: name, program, source."""
    rows = named_models().values()
    return "".join(f"  {row.name:<18}{row.program:<6}{row.source}\n" for row in rows)
