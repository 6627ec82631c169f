"""Shared by the rules: problems by field name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from megatron.core.config.cli import Problem, group_flags
from megatron.training.config.pretrain_config import GROUPS, PretrainConfig

Problems = Iterator[Problem]
Rule = Callable[[PretrainConfig], Problems]


@functools.cache
def _names() -> dict[str, tuple[str, bool]]:
    return {spec.field: (spec.names[0], spec.is_bool) for spec in group_flags(*GROUPS)}


def as_given(cfg: PretrainConfig, field: str) -> str:
    """The field that has this one's value from the user: ``--encoder-seq-length`` may stand for ``--seq-length``."""
    twin = f"encoder_{field}"
    return twin if field in ("seq_length", "num_layers") and twin in cfg.explicit - {field} else field


def problem(cfg: PretrainConfig, field: str, reason: str, fix: str = "") -> Problem:
    """A problem of a field, with its flag and value."""
    name, is_bool = _names()[as_given(cfg, field)]
    value = getattr(cfg, field)
    return Problem(name, reason, fix=fix) if is_bool or value is None else Problem(name, reason, value, fix)


def impossible_values(cfg: PretrainConfig) -> list[Problem]:
    """Return one problem per field whose value is outside its flag's range or form. Text from the command line was
    checked when it was parsed, so this finds values that a program set. Checks single fields only, not combinations."""
    found = []
    for spec in group_flags(*GROUPS):
        value = getattr(cfg, spec.field)
        reason = spec.refusal(value)
        if reason:
            found.append(problem(cfg, spec.field, reason))
    return found


def sequence_lengths(cfg: PretrainConfig) -> list[tuple[str, int]]:
    """(field, tokens) of the sequences of a sample."""
    fields = ("seq_length", "decoder_seq_length") if cfg.model_family == "t5" else ("seq_length",)
    return [(field, length) for field in fields if (length := getattr(cfg, field))]


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
}
"""Values that show what a required flag looks like."""


def missing(field: str, reason: str = "is required", fix: str = "") -> Problem:
    """A problem of a field that has no value."""
    name = _names()[field][0]
    if not fix and field in EXAMPLES:
        fix = f"for example {name} {EXAMPLES[field]}"
    return Problem(name, reason, fix=fix)


def flag_names(*fields: str) -> str:
    """Flags of these fields, joined by commas."""
    return ", ".join(_names()[field][0] for field in fields)
