"""Choice of update rules: --optimizer, or with Muon by the kind of parameter."""

from __future__ import annotations

from torch import nn

from megatron.core.config.muon import MUON_OPTIMIZERS, is_hidden_matrix
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import RuleFactory, find_rule
from megatron.core.sharding.named_slices import stored_parameters
from megatron.core.sharding.placement import declare, global_name, spec_or_replicated


def default_rule(config: OptimizerConfig, name: str, parameter: nn.Parameter) -> str | RuleFactory:
    """Return the rule that the spec of ``parameter`` declares, else ``config.optimizer``; for Muon's kinds the rule
    ``config.muon_scalar_optimizer`` if the parameter is no hidden matrix. Megatron-LM's attribute
    ``is_embedding_or_output_parameter`` excludes a parameter as well."""
    spec = spec_or_replicated(parameter)
    if spec.update_rule is not None:
        return spec.update_rule  # type: ignore[return-value]  # a class of this interface
    if config.optimizer not in MUON_OPTIMIZERS:
        return config.optimizer
    is_excluded = getattr(parameter, "is_embedding_or_output_parameter", False)
    is_matrix = is_hidden_matrix(global_name(name, spec), parameter.ndim) and not is_excluded
    return config.optimizer if is_matrix else config.muon_scalar_optimizer


def declare_update_rules(model: nn.Module, config: OptimizerConfig) -> None:
    """Declare the update rules that own matrices. Call it before ``model`` is wrapped for data parallelism, because
    shards must not cut these parameters."""
    for name, parameter in stored_parameters(model):
        rule = find_rule(default_rule(config, name, parameter))
        if parameter.requires_grad and getattr(rule, "owns", None) == "matrices":
            declare(parameter, update_rule=rule)
