"""Every rule about settings that contradict, exclude or need one another; all are run, and all problems reported.

A rule is a small named generator over a resolved configuration. The rules live in this package; this module runs
them.
"""

from __future__ import annotations

from megatron.core.config.cli import Problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules import (
    backends,
    checkpoints,
    context,
    data,
    data_parallel,
    layout,
    model,
    pipeline,
    training,
)  # fmt: skip

RULES = (
    *model.RULES, *backends.RULES, *layout.RULES, *context.RULES, *pipeline.RULES,
    *data_parallel.RULES, *training.RULES, *checkpoints.RULES,
)  # fmt: skip


def check(cfg: PretrainConfig) -> list[Problem]:
    """Everything that is wrong with a resolved configuration; an empty list means that it can run."""
    if not cfg.resolved:
        raise AssertionError("check() takes what resolve() returns")
    rules = (*RULES, *data.RULES) if cfg.needs_data else RULES
    problems = [problem for rule in rules for problem in rule(cfg)]
    return list({str(problem): problem for problem in problems}.values())
