"""Update rules: AdamW (or Adam with L2 decay) and SGD with momentum.

A rule declares its state tensors per parameter with their dtypes, and updates lists of tensors in place. Learning rate
and weight decay are Python floats. All other inputs, including the skip flag, are device tensors: no host sync.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.extensions.apex import ApexAdam
from megatron.core.fusions.adam import AdamGroup, AdamStep, AdamUpdate, choose_adam
from megatron.core.fusions.master_weights import Master, OptimizerEntry, as_fp32_lists
from megatron.core.optimizer.optimizer_config import OptimizerConfig

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Supported dtypes of moments. Formats with 5 exponent bits (fp16) or fewer would need a scale per tensor."""


class UpdateGroup(NamedTuple):
    """Tensors with the same learning rate and weight decay."""

    tensors: Sequence[OptimizerEntry]
    lr: float
    weight_decay: float


class Conditions(NamedTuple):
    """Inputs of one step that apply to all tensors, 0-d tensors on the parameters' device."""

    step: Tensor
    """fp32: number of updates, including this one."""
    skip: Tensor
    """fp32: 1 skips the update, 0 applies it."""
    factor: Tensor | None
    """Factor of the gradients (clipping, unscaling); None: 1."""


class UpdateRule(Protocol):
    """Interface of an update rule."""

    moment_dtypes: dict[str, torch.dtype]
    """State tensors per parameter: name -> dtype (fp64 parameters use fp64 instead)."""

    def update(self, groups: Sequence[UpdateGroup], conditions: Conditions) -> None:
        """Update masters, model weights and moments in place. May also scale the gradients in place, even if
        ``conditions.skip`` is 1."""


class Adam:
    """Adam with bias correction; ``masters`` determines the kernel, or Apex's is used (``config.apex_parts``)."""

    def __init__(self, config: OptimizerConfig, masters: Sequence[Master]) -> None:
        self.moment_dtypes = {
            "exp_avg": moment_dtype("--exp-avg-dtype", config.exp_avg_dtype),
            "exp_avg_sq": moment_dtype("--exp-avg-sq-dtype", config.exp_avg_sq_dtype),
        }
        self.config = config
        self._update: AdamUpdate
        if "adam" in config.apex_parts:
            self._update = ApexAdam()
            logger.info("%s", ApexAdam.description)
        else:
            self._update = choose_adam(masters)

    def update(self, groups: Sequence[UpdateGroup], conditions: Conditions) -> None:
        """Update masters, model weights and both moments of all ``groups`` in place, with betas, epsilon and kind of
        decay from the configuration. ``conditions.skip`` 1 changes none of them. May scale gradients in place (the
        Triton kernel does not). No host sync."""
        config = self.config
        step = AdamStep(
            config.adam_beta1, config.adam_beta2, config.adam_eps, config.decoupled_weight_decay, *conditions
        )
        self._update([AdamGroup(*group) for group in groups], step)


class SGD:
    """SGD with momentum: ``b <- momentum b + g + wd p; p <- p - lr b``, with torch's fused kernel. Without momentum it
    keeps no state."""

    def __init__(self, config: OptimizerConfig, masters: Sequence[Master]) -> None:
        self.momentum = config.sgd_momentum
        self.moment_dtypes = {"momentum_buffer": torch.float32} if self.momentum else {}

    def update(self, groups: Sequence[UpdateGroup], conditions: Conditions) -> None:
        """Update masters, model weights and momentum buffers of all ``groups`` in place, after multiplying the
        gradients by ``conditions.factor`` (in place if they have the masters' dtype). ``conditions.skip`` 1 skips the
        update. No host sync."""
        # is_first_step=False: buffers start at zero, which without dampening gives torch's first step
        for group in groups:
            for masters, gradients, moments in as_fp32_lists(group.tensors, conditions.factor):
                torch._fused_sgd_(
                    masters, gradients, moments[0] if moments else [], weight_decay=group.weight_decay,
                    momentum=self.momentum, lr=group.lr, dampening=0.0, nesterov=False, maximize=False,
                    is_first_step=False, grad_scale=None, found_inf=conditions.skip,
                )  # fmt: skip


def moment_dtype(flag: str, name: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a moment given by name or as a torch dtype. Raises UserError if it is not in
    ``DTYPES``; the message names ``flag``."""
    if isinstance(name, torch.dtype):
        name = next((known for known, dtype in DTYPES.items() if dtype == name), str(name))
    if name not in DTYPES:
        raise UserError(f"{flag} {name}: moments fall below what {name} can hold without scales; choose fp32 or bf16")
    return DTYPES[name]


RULES: dict[str, Callable[[OptimizerConfig, Sequence[Master]], UpdateRule]] = {"adam": Adam, "sgd": SGD}
"""Update rules by name (--optimizer, or ``optimizer`` in a parameter group)."""


def build_update_rule(name: str, config: OptimizerConfig, masters: Sequence[Master]) -> UpdateRule:
    """Build the update rule ``name`` for ``masters``. Raises UserError for an unknown name."""
    if name not in RULES:
        raise UserError(f"--optimizer {name}: not available yet; choose {' or '.join(RULES)}")
    return RULES[name](config, masters)
