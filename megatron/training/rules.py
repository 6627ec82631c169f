"""Every rule about settings that contradict, exclude or need one another; all are run, and all problems reported.

A rule is a small named generator over a resolved configuration. The rules live in ``rules_*.py``; this module runs
them.
"""

from __future__ import annotations

from megatron.core.cli import Problem, flags_of
from megatron.training import (
    rules_backends,
    rules_checkpoints,
    rules_context,
    rules_data,
    rules_data_parallel,
    rules_layout,
    rules_model,
    rules_pipeline,
    rules_training,
)
from megatron.training.config.availability import unavailable
from megatron.training.config.pretrain_config import GROUPS, PretrainConfig

RULES = (
    *rules_model.RULES, *rules_backends.RULES, *rules_layout.RULES, *rules_context.RULES, *rules_pipeline.RULES,
    *rules_data_parallel.RULES, *rules_training.RULES, *rules_checkpoints.RULES,
)  # fmt: skip


def check(cfg: PretrainConfig) -> list[Problem]:
    """Everything that is wrong with a resolved configuration; an empty list means that it can run."""
    if not cfg.resolved:
        raise AssertionError("check() takes what resolve() returns")
    rules = (*RULES, *rules_data.RULES) if cfg.needs_data else RULES
    problems = [problem for rule in rules for problem in rule(cfg)]
    problems += unavailable(flags_of(*GROUPS), lambda field: getattr(cfg, field), cfg.explicit)
    return list({str(problem): problem for problem in problems}.values())
