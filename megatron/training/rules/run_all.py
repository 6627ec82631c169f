"""Every rule about settings that contradict, exclude or need one another; all are run, and all problems reported.

A rule is a row of ``requirements.tsv``, or a small named generator over a resolved configuration: every public
generator function of this package's files is one."""

from __future__ import annotations

from dataclasses import fields, replace

from megatron.core.config.cli import Problem
from megatron.core.config.errors import UserError
from megatron.core.config.problems import Problems, collect_rules, flags, missing, problem
from megatron.core.config.requirements import read_table, unmet
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules import (
    backends,
    checkpoints,
    context,
    data,
    experts,
    fp8,
    layout,
    model,
    optimizer,
    pipeline,
    training,
    variable_lengths,
)
from megatron.training.rules.inputs import Line
from megatron.training.rules.sites import sites_exist

RULES = collect_rules(
    model, backends, layout, fp8, experts, context, variable_lengths, pipeline, training, optimizer, checkpoints
)


def unmet_requirements(cfg: PretrainConfig) -> Problems:
    """Yield the problems of the table of requirements, without flags of other model families."""
    foreign = {field.name for group in cfg.flat.foreign_groups for field in fields(group)}  # type: ignore[arg-type]
    for item in unmet(read_table(__package__), cfg.flat, cfg.explicit, flags(cfg)):
        if item.field not in foreign:
            yield (missing if item.is_missing else problem)(cfg, item.field, item.reason, item.fix)


def check(cfg: PretrainConfig) -> list[Problem]:
    """Return all problems of a resolved configuration; an empty list means that it can run."""
    rules = [*RULES, *collect_rules(data)] if cfg.needs_data else RULES
    problems = [problem for rule in (*rules, unmet_requirements) for problem in rule(cfg)]
    problems = problems or list(sites_exist(cfg)) or list(_companion_problems(cfg))  # these need valid sizes
    return list({str(problem): problem for problem in problems}.values())


def _companion_problems(cfg: PretrainConfig) -> Problems:
    try:
        companions = cfg.companions
    except UserError as error:  # a folder that cannot be read
        yield Line(str(error).partition(" ")[0].rstrip(":"), str(error))
        return
    for name, companion in companions.items():
        yield from (replace(problem, flag=f"companion {name}: {problem.flag}") for problem in check(companion))
