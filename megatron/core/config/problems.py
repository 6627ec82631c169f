"""Problems of settings by field name, for rules. Torch-free.

A rule is a small named generator over a resolved configuration. Helpers look up flags and values in its flat form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from inspect import isgeneratorfunction
from types import ModuleType
from typing import Any

from megatron.core.config.cli import FlagSpec, Problem

Problems = Iterator[Problem]
Settings = Any
"""The configuration of a run: a ``PretrainConfig``."""
Rule = Callable[[Settings], Problems]

EXAMPLES = {
    "num_layers": "12",
    "hidden_size": "768",
    "num_attention_heads": "12",
    "max_position_embeddings": "1024",
    "seq_length": "1024",
    "decoder_seq_length": "128",
    "micro_batch_size": "4",
    "lr": "3e-4",
    "vocab_size": "50257",
    "recompute_method": "uniform",
    "recompute_num_layers": "1",
    "num_moe_experts": "8",
}
"""Example values of required flags."""


def flags(cfg: Settings) -> Mapping[str, FlagSpec]:
    """Return the flags of a run by field."""
    return cfg.flat.flags


def as_given(cfg: Settings, field: str) -> str:
    """Return the field that the user set for ``field``: ``--encoder-seq-length`` may stand for ``--seq-length``."""
    twin = f"encoder_{field}"
    return twin if field in ("seq_length", "num_layers") and twin in cfg.explicit - {field} else field


def problem(cfg: Settings, field: str, reason: str, fix: str = "") -> Problem:
    """Return a problem of a field, with its flag and value."""
    return flags(cfg)[as_given(cfg, field)].problem(getattr(cfg.flat, field), reason, fix)


def missing(cfg: Settings, field: str, reason: str = "is required", fix: str = "") -> Problem:
    """Return a problem of a field that has no value."""
    name = flags(cfg)[field].names[0]
    if not fix and field in EXAMPLES:
        fix = f"for example {name} {EXAMPLES[field]}"
    return Problem(name, reason, fix=fix)


def flag_names(cfg: Settings, *fields: str) -> str:
    """Return the flags of these fields, joined by commas."""
    specs = flags(cfg)
    return ", ".join(specs[field].names[0] for field in fields)


def collect_rules(*files: ModuleType) -> tuple[Rule, ...]:
    """Return every public generator function that these modules define, in order."""
    return tuple(
        member
        for file in files
        for name, member in vars(file).items()
        if isgeneratorfunction(member) and member.__module__ == file.__name__ and not name.startswith("_")
    )


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples of ``divisor`` around ``value``, for a fix."""
    below = value // divisor * divisor
    return f"nearest: {below} or {below + divisor}" if below else f"nearest: {divisor}"


def common_divisors(*values: int) -> str:
    """The numbers that divide all of ``values``, for a fix."""
    largest = math.gcd(*values)
    small = [size for size in range(1, math.isqrt(largest) + 1) if largest % size == 0]
    shared = sorted({*small, *(largest // size for size in small)})
    return ", ".join(map(str, shared[:12]))
