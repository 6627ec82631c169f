"""Optimizers. ``get_megatron_optimizer`` builds an optimizer from an ``OptimizerConfig``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatron import serve_other_names
from megatron.core import parallel_state
from megatron.core.distributed.data_parallel import unwrapped
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import (
    ParameterRule,
    RuleChoice,
    get_mup_config_overrides,
    get_standard_config_overrides,
    is_no_decay_or_embedding,
    parameter_groups,
    report_groups,
)
from megatron.core.optimizer.param_keys import Overrides, ParamGroupOverride, ParamKey
from megatron.core.sharding.named_slices import stored_parameters

__all__ = [
    "MegatronOptimizer", "OptimizerConfig", "ParamGroupOverride", "ParamKey", "get_megatron_optimizer",
    "get_mup_config_overrides", "get_standard_config_overrides",
]  # fmt: skip

_WITHOUT_EFFECT = {"use_gloo_process_groups", "pg_collection", "dump_param_to_param_group_map"}
"""Megatron-LM arguments that are accepted and ignored: all collectives use the process groups in ``groups``."""


def get_megatron_optimizer(
    config: OptimizerConfig, model_chunks: Sequence[nn.Module],
    no_weight_decay_cond: ParameterRule | Overrides | None = None, scale_lr_cond: ParameterRule | None = None,
    lr_mult: float = 1.0, *, update_rule: RuleChoice | None = None, groups: ProcessGroups | None = None,
    **arguments: Any,
) -> MegatronOptimizer:  # fmt: skip
    """Build the optimizer for all trainable parameters of ``model_chunks``, and log the parameter groups. Allocates all
    optimizer state. Chunks may have a data-parallel wrapper; it then defines the shards to update. Raises TypeError for
    any other keyword argument. Raises UserError if no parameter is trainable, or for settings that are not supported.

    Args:
        config: optimizer kind, learning rates, weight decay, clipping, loss scale.
        no_weight_decay_cond: (name, parameter) -> whether weight decay is off; default: biases and 1-d parameters,
            except q/k norms with ``apply_wd_to_qk_layernorm``. A mapping at this position is ``config_overrides``.
        scale_lr_cond: (name, parameter) -> whether the learning rate is multiplied by ``lr_mult``.
        update_rule: (name, parameter) -> "adam", "sgd" or a class; default: as declared in the parameter's spec, else
            ``config.optimizer``.
        arguments: ``config_overrides`` (settings per parameter, see ``param_keys.py``; they replace the default rules
            and ``no_weight_decay_cond``) and ``default_skip_embedding_weight_decay``. A few more are ignored."""
    overrides = arguments.pop("config_overrides", None)
    skips_embeddings = arguments.pop("default_skip_embedding_weight_decay", False)
    if unknown := sorted(arguments.keys() - _WITHOUT_EFFECT):
        raise TypeError(f"get_megatron_optimizer() has no arguments {', '.join(unknown)}")
    if isinstance(no_weight_decay_cond, Mapping):
        overrides, no_weight_decay_cond = no_weight_decay_cond, None
    if skips_embeddings and no_weight_decay_cond is None:
        no_weight_decay_cond = is_no_decay_or_embedding
    groups = groups or parallel_state.get_process_groups()
    named = [(name, parameter) for chunk in model_chunks for name, parameter in stored_parameters(unwrapped(chunk))]
    param_groups = parameter_groups(
        config, named, no_weight_decay=no_weight_decay_cond, scale_lr=scale_lr_cond, lr_mult=lr_mult,
        update_rule=update_rule, overrides=overrides,
    )  # fmt: skip
    report_groups(param_groups)
    return MegatronOptimizer(config, param_groups, model_chunks, grad_scaler=_grad_scaler(config), groups=groups)


def _grad_scaler(config: OptimizerConfig) -> ConstantGradScaler | DynamicGradScaler | None:
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale, min_scale=config.min_loss_scale,
        growth_interval=int(config.loss_scale_window), hysteresis=config.hysteresis,
    )  # fmt: skip


serve_other_names(__name__)
