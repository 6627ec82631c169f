"""Every rule about settings that contradict, exclude or need one another; all are run, and all problems reported.

A rule is a small named generator over a resolved configuration: every public generator function of this package's
files is one.
"""

from __future__ import annotations

from inspect import isgeneratorfunction
from types import ModuleType

from megatron.core.config.cli import Problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules import (
    backends,
    checkpoints,
    context,
    data,
    data_parallel,
    encoder_decoder,
    experts,
    families,
    layout,
    masked_data,
    model,
    pipeline,
    training,
)  # fmt: skip
from megatron.training.rules.common import Rule


def collect_rules(*files: ModuleType) -> list[Rule]:
    """Every public generator function that these files define, in their order."""
    return [
        member for file in files for name, member in vars(file).items()
        if isgeneratorfunction(member) and member.__module__ == file.__name__ and not name.startswith("_")
    ]  # fmt: skip


RULES = collect_rules(
    model, families, encoder_decoder, backends, layout, experts, context, pipeline, data_parallel, training, checkpoints
)


def check(cfg: PretrainConfig) -> list[Problem]:
    """Return all problems of a resolved configuration; an empty list means that it can run."""
    if not cfg.resolved:
        raise AssertionError("check() takes what resolve() returns")
    rules = [*RULES, *collect_rules(data, masked_data)] if cfg.needs_data else RULES
    problems = [problem for rule in rules for problem in rule(cfg)]
    return list({str(problem): problem for problem in problems}.values())
