"""Rules about optional groups of flags, which only some model families have."""

from __future__ import annotations

from megatron.core.config.optional import used_fields
from megatron.core.config.problems import Problems, problem
from megatron.core.models.registry import scripts_with
from megatron.training.config.pretrain_config import PretrainConfig


def family_has_groups(cfg: PretrainConfig) -> Problems:
    """Reject used fields of groups that the model family does not list, except harmless fields."""
    for group in cfg.flat.foreign_groups:
        used = [field for field in used_fields(group, cfg.flat) if field not in group.HARMLESS]
        for field in [field for field in used if field in cfg.explicit] or used:  # others may derive from these
            fix = group.CHOICES[field][1] if field in group.CHOICES else "remove it"
            yield problem(cfg, field, f"is supported only by {scripts_with(group)}", fix)


def family_rules(cfg: PretrainConfig) -> Problems:
    """Apply the rules of the model family."""
    for rule in cfg.family.rules:
        yield from rule(cfg)
