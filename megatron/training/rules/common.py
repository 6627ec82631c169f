"""Shared by rules: values of single fields, and lengths of sequences."""

from __future__ import annotations

from megatron.core.config.cli import Problem
from megatron.training.config.pretrain_config import PretrainConfig


def impossible_values(cfg: PretrainConfig) -> list[Problem]:
    """Return one problem per field whose value is outside its flag's range or form; finds values that a program set."""
    values = ((spec, getattr(cfg.flat, spec.field)) for spec in cfg.flat.flags.values())
    return [spec.problem(value, reason) for spec, value in values if (reason := spec.refusal(value))]


def sequence_lengths(cfg: PretrainConfig) -> list[tuple[str, int]]:
    """Return (field, tokens) of the sequences of a sample whose lengths are known."""
    return [(field, length) for field in cfg.family.lengths if (length := getattr(cfg.flat, field))]
