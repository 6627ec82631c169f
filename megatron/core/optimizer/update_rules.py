"""Update rules: AdamW (or Adam with L2 decay) and SGD with momentum.

A rule says which state it keeps per parameter and in which format, and updates lists of tensors. Everything that it
is told beyond rates stays on the device, whether to skip included.
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
from megatron.core.fusions.master_weights import Master, Updated, opened
from megatron.core.optimizer.optimizer_config import OptimizerConfig

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Formats of moments. With 5 (fp16) or fewer bits of exponent they would need a scale per tensor."""


class UpdateGroup(NamedTuple):
    """Tensors that share rate and decay."""

    tensors: Sequence[Updated]
    lr: float
    weight_decay: float


class Conditions(NamedTuple):
    """0-d tensors on the parameters' device."""

    step: Tensor
    """fp32: number of updates, this one counted."""
    skip: Tensor
    """fp32: 1 changes nothing, 0 updates."""
    factor: Tensor | None
    """Factor of the gradients; None: 1."""


class UpdateRule(Protocol):
    """One kind of optimizer."""

    moment_dtypes: dict[str, torch.dtype]
    """State tensors of a parameter: name to dtype, where the parameter is not fp64."""

    def update(self, groups: Sequence[UpdateGroup], conditions: Conditions) -> None:
        """One update of all tensors, in place."""


class Adam:
    """Adam with bias correction, by the operator that fits ``masters``, or by apex's."""

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
        """:meth:`UpdateRule.update`."""
        config = self.config
        step = AdamStep(
            config.adam_beta1, config.adam_beta2, config.adam_eps, config.decoupled_weight_decay, *conditions
        )
        self._update([AdamGroup(*group) for group in groups], step)


class SGD:
    """``b <- momentum b + g + wd p, p <- p - lr b``, by torch's fused operator."""

    def __init__(self, config: OptimizerConfig, masters: Sequence[Master]) -> None:
        self.momentum = config.sgd_momentum
        self.moment_dtypes = {"momentum_buffer": torch.float32} if self.momentum else {}

    def update(self, groups: Sequence[UpdateGroup], conditions: Conditions) -> None:
        """:meth:`UpdateRule.update`."""
        for group in groups:
            for masters, gradients, moments in opened(group.tensors, conditions.factor):
                torch._fused_sgd_(
                    masters, gradients, moments[0] if moments else [], weight_decay=group.weight_decay,
                    momentum=self.momentum, lr=group.lr, dampening=0.0, nesterov=False, maximize=False,
                    is_first_step=False, grad_scale=None, found_inf=conditions.skip,
                )  # fmt: skip


def moment_dtype(flag: str, name: str | torch.dtype) -> torch.dtype:
    """The dtype that ``flag`` names, or that a program gives; ``ValueError`` for one that is not available."""
    if isinstance(name, torch.dtype):
        name = next((known for known, dtype in DTYPES.items() if dtype == name), str(name))
    if name not in DTYPES:
        raise UserError(f"{flag} {name}: moments fall below what {name} can hold without scales; choose fp32 or bf16")
    return DTYPES[name]


RULES: dict[str, Callable[[OptimizerConfig, Sequence[Master]], UpdateRule]] = {"adam": Adam, "sgd": SGD}
"""--optimizer, or ``optimizer`` of a parameter group."""


def build_update_rule(name: str, config: OptimizerConfig, masters: Sequence[Master]) -> UpdateRule:
    """The rule called ``name`` for ``masters``; ``UserError`` for one that does not exist."""
    if name not in RULES:
        raise UserError(f"--optimizer {name}: not available yet; choose {' or '.join(RULES)}")
    return RULES[name](config, masters)
