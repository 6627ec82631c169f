"""Which parameter gets which weight decay and learning rate: parameter groups, by rule from global names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from megatron.core.optimizer.optimizer_config import OptimizerConfig

logger = logging.getLogger(__name__)

NamedParameter = tuple[str, nn.Parameter]
ParameterRule = Callable[[str, nn.Parameter], bool]
RuleChoice = Callable[[str, nn.Parameter], str]
"""(name, parameter) -> the name of an update rule (``update_rules.RULES``)."""

_INPUT_AND_OUTPUT = ("word_embeddings.weight", "output_layer.weight")
_QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")


def is_embedding_or_output(name: str) -> bool:
    """Parameters that --decoupled-lr is about."""
    return name.endswith(_INPUT_AND_OUTPUT)


def has_no_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Biases and vectors (norm weights) are not decayed."""
    return name.endswith(("bias", "layer_norm_weight")) or parameter.ndim == 1


def has_no_weight_decay_but_qk_norms(name: str, parameter: nn.Parameter) -> bool:
    """The same, but the norms of queries and keys are decayed (--apply-wd-to-qk-layernorm)."""
    return has_no_weight_decay(name, parameter) and not name.endswith(_QK_NORMS)


def parameter_groups(
    config: OptimizerConfig, named: Iterable[NamedParameter], *, no_weight_decay: ParameterRule | None = None,
    scale_lr: ParameterRule | None = None, lr_mult: float = 1.0, update_rule: RuleChoice | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Groups with ``params`` and ``names`` (parallel lists), ``wd_mult``, ``lr_mult``, ``max_lr``, ``min_lr``,
    ``is_expert_parallel``, and the name of their update rule as ``optimizer``.

    Args:
        config: rates and decoupled rates.
        named: (global name, parameter), the order of which is kept within a group.
        no_weight_decay: which parameters are not decayed.
        scale_lr: which parameters' rate is multiplied by ``lr_mult``.
        lr_mult: that factor.
        update_rule: which rule updates a parameter; by default ``config.optimizer`` all of them.
    """
    rule = no_weight_decay or (
        has_no_weight_decay_but_qk_norms if config.apply_wd_to_qk_layernorm else has_no_weight_decay
    )
    groups: dict[tuple[float, float, bool, bool, str], dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        decoupled = config.decoupled_lr is not None and is_embedding_or_output(name)
        wd = 0.0 if rule(name, parameter) else 1.0
        mult = lr_mult if scale_lr is not None and scale_lr(name, parameter) else 1.0
        kind = config.optimizer if update_rule is None else update_rule(name, parameter)
        spec = getattr(parameter, "spec", None)
        key = (wd, mult, decoupled, spec is not None and spec.is_expert, kind)
        group = groups.setdefault(key, _empty_group(config, *key))
        group["params"].append(parameter)
        group["names"].append(name)
    # decayed first, then by multiplier: an order that does not depend on which parameter happens to come first
    return [groups[key] for key in sorted(groups, key=lambda key: (-key[0], *key[1:]))]


def _empty_group(
    config: OptimizerConfig, wd_mult: float, lr_mult: float, decoupled: bool, expert: bool, kind: str
) -> dict[str, Any]:  # fmt: skip
    max_lr = min_lr = None  # those of the schedule
    if decoupled:
        max_lr = config.decoupled_lr
        min_lr = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return {
        "params": [], "names": [], "wd_mult": wd_mult, "lr_mult": lr_mult, "is_decoupled_lr": decoupled,
        "is_expert_parallel": expert, "max_lr": max_lr, "min_lr": min_lr, "optimizer": kind,
    }  # fmt: skip


def report_groups(groups: Iterable[dict[str, Any]]) -> None:
    """Logs what is decayed and what is not."""
    for group in groups:
        kind = "decayed" if group["wd_mult"] else "not decayed"
        count = sum(parameter.numel() for parameter in group["params"])
        more = ", decoupled learning rate" * group["is_decoupled_lr"] + ", of experts" * group["is_expert_parallel"]
        logger.info("parameters %s%s: %d tensors, %d elements", kind, more, len(group["names"]), count)
        logger.debug("  %s", ", ".join(group["names"]))
