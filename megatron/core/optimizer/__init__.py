"""Optimizers of the library. ``get_megatron_optimizer`` builds the one that a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed.data_parallel import unwrapped
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParameterRule, RuleChoice, parameter_groups, report_groups

__all__ = ["MegatronOptimizer", "OptimizerConfig", "get_megatron_optimizer"]


def get_megatron_optimizer(
    config: OptimizerConfig, model_chunks: Sequence[nn.Module], no_weight_decay_cond: ParameterRule | None = None,
    scale_lr_cond: ParameterRule | None = None, lr_mult: float = 1.0, *, update_rule: RuleChoice | None = None,
    groups: ProcessGroups | None = None,
) -> MegatronOptimizer:  # fmt: skip
    """The optimizer of ``config`` over all trained parameters of ``model_chunks``, data-parallel wrappers or not.

    Args:
        config: kind, rates, decay, clipping, loss scale.
        model_chunks: this rank's chunks.
        no_weight_decay_cond: (name, parameter) -> not decayed; by default biases and vectors.
        scale_lr_cond: (name, parameter) -> rate multiplied by ``lr_mult``.
        lr_mult: that factor.
        update_rule: (name, parameter) -> "adam" or "sgd", where not all are updated by ``config.optimizer``.
        groups: this rank's process groups; None takes those of ``parallel_state``, one rank where it has none.
    """
    groups = groups or parallel_state.get_process_groups()
    named = [(name, parameter) for chunk in model_chunks for name, parameter in unwrapped(chunk).named_parameters()]
    param_groups = parameter_groups(
        config, named, no_weight_decay=no_weight_decay_cond, scale_lr=scale_lr_cond, lr_mult=lr_mult,
        update_rule=update_rule,
    )  # fmt: skip
    report_groups(param_groups)
    return MegatronOptimizer(config, param_groups, model_chunks, grad_scaler=_grad_scaler(config), groups=groups)


def _grad_scaler(config: OptimizerConfig) -> ConstantGradScaler | DynamicGradScaler | None:
    """Constant with --loss-scale; dynamic for fp16 without it; none otherwise."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale, min_scale=config.min_loss_scale,
        growth_interval=int(config.loss_scale_window), hysteresis=config.hysteresis,
    )  # fmt: skip
