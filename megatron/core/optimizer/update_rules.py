"""Update rules: AdamW (or Adam with L2 decay), SGD with momentum, Lion, and Muon (``muon.py``, ``adaptive_muon.py``).

A rule declares its state tensors per parameter with their dtypes, and what it owns: elements, which optimizer shards
may cut anywhere, or matrices. It updates the storages and moments of a list of :class:`Entry` in place. Learning rate
and weight decay are Python floats. All other inputs, including the skip flag, are device tensors: no host sync.

A rule that owns matrices is declared in the parameters' specs (``placement.declare(parameter, update_rule=Rule)``),
because shards are cut before the optimizer is built. :meth:`Entry.full` gathers a matrix that tensor parallelism or
FSDP splits; ZeRO-1 shards consist of full parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.config.errors import UserError, listed
from megatron.core.extensions.apex import ApexAdam
from megatron.core.fusions.adam import AdamStep, AdamUpdate, choose_adam
from megatron.core.fusions.storage import OptimizerEntry, Storage, as_fp32_lists, by_rates
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.optimizer.adaptive_muon import AdaptiveMuon
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.sharding.full_tensor import gather_full, take_shard
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import ParameterSpec, spec_or_replicated

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Supported dtypes of moments. Formats with 5 exponent bits (fp16) or fewer would need a scale per tensor."""


@dataclass(slots=True)
class Entry(OptimizerEntry):
    """One parameter shard with its state, gradient, learning rate and weight decay."""

    name: str
    """Parameter name in the module."""
    shard: ParameterShard
    groups: ProcessGroups
    copies: Group
    """Data-parallel ranks that update the same shard."""
    eps: float | None = None
    """Adam's epsilon; None: the configuration's."""

    @property
    def spec(self) -> ParameterSpec:
        """Declaration of the parameter."""
        return spec_or_replicated(self.shard.parameter)

    def full(self, local: Tensor, keep: Collection[str] = ()) -> Tensor:
        """All-gather ``local``, shaped as the shard (gradient, moment, master), to the global tensor in its logical
        shape. Collective over the axes that split the parameter, except the axes ``keep``, and over FSDP ranks."""
        return gather_full(local, self.shard, self.groups, keep)

    def local(self, full: Tensor, keep: Collection[str] = ()) -> Tensor:
        """Return this rank's elements of the result of :meth:`full` with the same ``keep``, shaped as the shard."""
        return take_shard(full, self.shard, self.groups, keep)


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

    owns: ClassVar[Literal["elements", "matrices"]]
    """Whether the rule updates elements independently, or needs full matrices."""
    moment_dtypes: dict[str, torch.dtype]
    """State tensors per parameter: name -> dtype (fp64 parameters use fp64 instead)."""

    def update(self, entries: Sequence[Entry], conditions: Conditions) -> None:
        """Update masters, model weights and moments in place. May scale the gradients in place, even if
        ``conditions.skip`` is 1. Ranks that share a parameter pass their entries in the same order: a rule may run
        collectives."""


RuleFactory = Callable[[OptimizerConfig, Sequence[Storage]], UpdateRule]
"""Class of an update rule: (configuration, storages that it will update) -> rule."""


class Adam:
    """Adam with bias correction. The ``storages`` that it will update determine the kernel (Triton or torch), unless
    Apex's is used ("adam" in ``config.apex_parts``). Raises UserError for a moment dtype other than fp32 and bf16, or
    if Apex is required and missing."""

    owns: ClassVar[Literal["elements", "matrices"]] = "elements"

    def __init__(self, config: OptimizerConfig, storages: Sequence[Storage]) -> None:
        self.moment_dtypes = {
            "exp_avg": moment_dtype("--exp-avg-dtype", config.exp_avg_dtype),
            "exp_avg_sq": moment_dtype("--exp-avg-sq-dtype", config.exp_avg_sq_dtype),
        }
        self.config = config
        self._update: AdamUpdate = ApexAdam() if "adam" in config.apex_parts else choose_adam(storages)

    def update(self, entries: Sequence[Entry], conditions: Conditions) -> None:
        """Update masters, model weights and both moments of all ``entries`` in place. ``conditions.skip`` 1 changes
        none of them. May scale gradients in place (the Triton kernel does not). No host sync."""
        config = self.config
        by_eps: dict[float, list[Entry]] = {}
        for entry in entries:
            by_eps.setdefault(config.adam_eps if entry.eps is None else entry.eps, []).append(entry)
        for eps, group in by_eps.items():
            step = AdamStep(config.adam_beta1, config.adam_beta2, eps, config.decoupled_weight_decay, *conditions)
            self._update(group, step)


class SGD:
    """SGD with momentum: ``b <- momentum b + g + wd p; p <- p - lr b``, with torch's fused kernel."""

    owns: ClassVar[Literal["elements", "matrices"]] = "elements"

    def __init__(self, config: OptimizerConfig, storages: Sequence[Storage]) -> None:
        self.momentum = config.sgd_momentum
        self.moment_dtypes = {"momentum_buffer": torch.float32} if self.momentum else {}

    def update(self, entries: Sequence[Entry], conditions: Conditions) -> None:
        """Update masters, model weights and momentum buffers of all ``entries`` in place, after multiplying the
        gradients by ``conditions.factor`` (in place if they have the masters' dtype). ``conditions.skip`` 1 changes no
        weights or momentum, but still scales gradients. No host sync."""
        # is_first_step=False: buffers start at zero, which without dampening gives torch's first step
        for (lr, weight_decay), group in by_rates(entries).items():
            for masters, gradients, moments in as_fp32_lists(group, conditions.factor):
                torch._fused_sgd_(
                    masters, gradients, moments[0] if moments else [], weight_decay=weight_decay,
                    momentum=self.momentum, lr=lr, dampening=0.0, nesterov=False, maximize=False,
                    is_first_step=False, grad_scale=None, found_inf=conditions.skip,
                )  # fmt: skip


class Lion:
    """``p <- p - lr (sign(b1 m + (1 - b1) g) + wd p)``, ``m <- b2 m + (1 - b2) g`` (arXiv 2302.06675)."""

    owns: ClassVar[Literal["elements", "matrices"]] = "elements"

    def __init__(self, config: OptimizerConfig, storages: Sequence[Storage]) -> None:
        self.betas = config.lion_beta1, config.lion_beta2
        self.decoupled = config.decoupled_weight_decay
        self.moment_dtypes = {"exp_avg": torch.float32}

    def update(self, entries: Sequence[Entry], conditions: Conditions) -> None:
        """Update masters, model weights and momentum of all ``entries`` in place. ``conditions.skip`` 1 changes none of
        them. Does not change gradients. No host sync."""
        for entry in entries:
            (momentum,), master = entry.moments, entry.storage.read()
            gradient = entry.scaled_gradient(conditions.factor, decoupled=self.decoupled)
            first, second = (torch.lerp(momentum, gradient, 1.0 - beta) for beta in self.betas)
            decay = entry.weight_decay if self.decoupled else 0.0
            entry.write(conditions.skip, master - entry.lr * (first.sign() + decay * master), second)


def moment_dtype(flag: str, name: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a moment given as "fp32", "bf16" or one of these torch dtypes. Raises UserError for any
    other, such as fp16; the message names ``flag``."""
    if isinstance(name, torch.dtype):
        name = next((key for key, dtype in DTYPES.items() if dtype == name), str(name))
    if name not in DTYPES:
        raise UserError(f"{flag} {name}: moments fall below what {name} can hold without scales; choose fp32 or bf16")
    return DTYPES[name]


RULES: dict[str, RuleFactory] = {
    "adam": Adam, "sgd": SGD, "lion": Lion, "muon": Muon, "adaptive_muon": AdaptiveMuon,
}  # fmt: skip
"""Update rules by name (--optimizer, or ``optimizer`` in a parameter group)."""


def find_rule(rule: str | RuleFactory) -> RuleFactory:
    """Return the class of a rule given by name; a class is returned as it is. Raises UserError for an unknown name."""
    if not isinstance(rule, str):
        return rule
    if rule not in RULES:
        raise UserError(f"optimizer {rule!r}: there is no such update rule; choose {listed([*RULES], most=9)}")
    return RULES[rule]
