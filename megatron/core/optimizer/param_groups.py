"""Parameter groups: weight decay, learning rate and update rule per parameter, from its global name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from megatron.core.config.muon import is_hidden_matrix
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_keys import (
    Overrides,
    ParamGroupOverride,
    ParamKey,
    ParamWithNamePredicate,
    find_overrides,
)
from megatron.core.optimizer.rule_choice import default_rule
from megatron.core.optimizer.update_rules import RuleFactory, find_rule
from megatron.core.sharding.placement import spec_or_replicated

logger = logging.getLogger(__name__)

NamedParameter = tuple[str, nn.Parameter]
ParameterRule = Callable[[str, nn.Parameter], bool]
RuleChoice = Callable[[str, nn.Parameter], str | RuleFactory]
"""(name, parameter) -> update rule: key of ``update_rules.RULES``, or a class."""

_INPUT_AND_OUTPUT = ("word_embeddings.weight", "output_layer.weight")
_QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")


def is_embedding_or_output(name: str) -> bool:
    """Whether --decoupled-lr applies: word embeddings and the output layer."""
    return name.endswith(_INPUT_AND_OUTPUT)


def has_no_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter has no weight decay: biases and 1-d parameters (norm weights)."""
    return name.endswith(("bias", "layer_norm_weight")) or parameter.ndim == 1


def has_no_weight_decay_but_qk_norms(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter has no weight decay with --apply-wd-to-qk-layernorm, which decays the q/k norms."""
    return has_no_weight_decay(name, parameter) and not name.endswith(_QK_NORMS)


def is_no_decay_or_embedding(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias, a 1-d parameter or an embedding (``default_skip_embedding_weight_decay``)."""
    return has_no_weight_decay(name, parameter) or "embedding" in name


def parameter_groups(
    config: OptimizerConfig, named: Iterable[NamedParameter], *, no_weight_decay: ParameterRule | None = None,
    scale_lr: ParameterRule | None = None, lr_mult: float = 1.0, update_rule: RuleChoice | None = None,
    overrides: Overrides | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Split the trainable parameters into groups with equal settings. A group has ``params`` and ``names`` (parallel
    lists), ``wd_mult``, ``lr_mult``, ``max_lr``, ``min_lr`` (None: from the schedule), ``is_decoupled_lr``,
    ``is_expert_parallel``, ``optimizer`` (its update rule), and any overrides. The order of groups depends on their
    settings only: groups with weight decay come first.

    Args:
        config: learning rates, decoupled learning rates, default update rule.
        named: (global name, parameter) pairs; their order is kept within a group.
        no_weight_decay: predicate for parameters without weight decay; default: biases and 1-d parameters, except q/k
            norms with ``apply_wd_to_qk_layernorm``.
        scale_lr: predicate for parameters whose learning rate is multiplied by ``lr_mult``.
        update_rule: update rule per parameter; default: as declared in its spec, else by ``config.optimizer``.
        overrides: group settings per parameter. They replace the default rules of weight decay and decoupled learning
            rates, which ``get_standard_config_overrides`` returns as overrides; ``no_weight_decay`` is then ignored."""
    rule = no_weight_decay or (
        has_no_weight_decay_but_qk_norms if config.apply_wd_to_qk_layernorm else has_no_weight_decay
    )
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        decoupled = overrides is None and config.decoupled_lr is not None and is_embedding_or_output(name)
        wd = 0.0 if overrides is None and rule(name, parameter) else 1.0
        mult = lr_mult if scale_lr is not None and scale_lr(name, parameter) else 1.0
        spec = spec_or_replicated(parameter)
        kind = default_rule(config, name, parameter) if update_rule is None else update_rule(name, parameter)
        values = {} if overrides is None else find_overrides(overrides, parameter, name)
        settings = tuple(sorted(values.items()))
        key = (wd, mult, decoupled, spec.is_expert, kind)
        group = groups.setdefault((*key, settings), {**_empty_group(config, *key), **values})
        group["params"].append(parameter)
        group["names"].append(name)
    # sort by settings, so that the order of groups does not depend on which parameter comes first
    return [groups[key] for key in sorted(groups, key=lambda key: (-key[0], *key[1:-2], repr(key[-2:])))]


def _empty_group(
    config: OptimizerConfig, wd_mult: float, lr_mult: float, decoupled: bool, expert: bool, kind: object
) -> dict[str, Any]:
    """Return a group without parameters or ``lr``; without ``decoupled``, rates are None."""
    max_lr = min_lr = None  # from the schedule
    if decoupled:
        max_lr = config.decoupled_lr
        min_lr = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return {
        "params": [], "names": [], "wd_mult": wd_mult, "lr_mult": lr_mult, "is_decoupled_lr": decoupled,
        "is_expert_parallel": expert, "max_lr": max_lr, "min_lr": min_lr, "optimizer": kind,
    }  # fmt: skip


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the default rules as ``config_overrides``. Biases and 1-d parameters get ``wd_mult`` 0, except q/k norms
    with ``apply_wd_to_qk_layernorm``. If ``decoupled_lr`` is set, word embeddings and the output layer get it as
    ``max_lr``, and ``decoupled_min_lr`` as ``min_lr`` if set."""
    no_decay = has_no_weight_decay_but_qk_norms if config.apply_wd_to_qk_layernorm else has_no_weight_decay
    is_plain = ParamWithNamePredicate("no weight decay", lambda param, name: no_decay(name, param))
    overrides = {ParamKey(with_name_predicate=is_plain): ParamGroupOverride(wd_mult=0.0)}
    if config.decoupled_lr is not None:
        rates = ParamGroupOverride(max_lr=config.decoupled_lr)
        if config.decoupled_min_lr is not None:
            rates["min_lr"] = config.decoupled_min_lr
        is_decoupled = ParamWithNamePredicate("decoupled rates", lambda param, name: is_embedding_or_output(name))
        overrides[ParamKey(with_name_predicate=is_decoupled)] = rates
    return overrides


def get_mup_config_overrides(
    config: OptimizerConfig, mup_width_mult: float, optimizer_type: str = "adam"
) -> dict[ParamKey, ParamGroupOverride]:
    """Return muP's rates and Adam's epsilon per class of parameters (``config/mup.py``) as ``config_overrides``. They
    leave decoupled rates and Muon's matrices as they are. Empty for the multiplier 1. ``optimizer_type``: any case."""

    def is_matrix(parameter: nn.Parameter, name: str) -> bool:
        rule = find_rule(default_rule(config, name, parameter))
        return is_hidden_matrix(name, parameter.ndim) and getattr(rule, "owns", "elements") == "elements"

    def is_vector(parameter: nn.Parameter, name: str) -> bool:
        decoupled = config.decoupled_lr is not None and is_embedding_or_output(name)
        return not is_hidden_matrix(name, parameter.ndim) and not decoupled

    if mup_width_mult == 1.0:
        return {}
    is_sgd = optimizer_type.lower() == "sgd"
    factor = mup_width_mult if is_sgd else 1.0 / mup_width_mult
    rates = ParamGroupOverride(max_lr=(config.lr or 0.0) * factor, min_lr=(config.min_lr or 0.0) * factor)
    if "adam" in optimizer_type.lower():
        rates["eps"] = config.adam_eps * factor
    predicate = ParamWithNamePredicate("muP", is_vector if is_sgd else is_matrix)
    return {ParamKey(with_name_predicate=predicate): rates}


def report_groups(groups: Iterable[dict[str, Any]]) -> None:
    """Log one line per parameter group at INFO, on every rank: number of tensors and local elements, whether it has
    weight decay, decoupled rates or experts; and the parameter names at DEBUG."""
    for group in groups:
        kind = "decayed" if group["wd_mult"] else "not decayed"
        count = sum(parameter.numel() for parameter in group["params"])
        more = ", decoupled learning rate" * group["is_decoupled_lr"] + ", of experts" * group["is_expert_parallel"]
        logger.info("parameters %s%s: %d tensors, %d elements", kind, more, len(group["names"]), count)
        logger.debug("  %s", ", ".join(group["names"]))
