"""The optimizer step: measure, check, then clip, update and round in one pass (``update_rules``). Gradients are read
from ``parameter.main_grad`` (see ``core/distributed``), or ``parameter.grad`` without it.

An optimizer is a list of parts, each an update rule, the ranks that hold and share out its parameters, and parameter
groups: AdamW beside another rule, dense parameters beside experts. Norm, clipping and skipping are of all of them.

An update works on *masters* (``fusions/master_weights``): the model's own weights where they are fp32 (or fp64); fp32
copies of them, or the 16 bits that they lack, where the model computes in half precision. Where data-parallel ranks
share out the update (a distributed optimizer, fully sharded data parallelism), there is a master for what this rank
updates of each parameter: ``ParameterShard`` says what, nothing else differs.

The host need not wait for the device: whether a gradient was finite decides there whether anything changes, and
:meth:`MegatronOptimizer.update` hands out tensors.

State is known by global parameter names, so that it can be saved, compared and loaded without knowing any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.fusions.master_weights import Master, Updated, master_of
from megatron.core.groups.process_groups import DataParallelGroups, ProcessGroups
from megatron.core.optimizer.clip_grads import Share, clip_coefficient, count_zeros, l2_norm
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import Conditions, UpdateGroup, UpdateRule, build_update_rule
from megatron.core.sharding.flat_pieces import flat_pieces
from megatron.core.sharding.parameter_shard import ParameterShard, whole
from megatron.core.sharding.placement import data_parallel_groups, is_counted_here, spec_or_replicated
from megatron.core.sharding.sharded_tensor import ShardedTensor, stretch_tensors

GradScaler = ConstantGradScaler | DynamicGradScaler
HALF = (torch.bfloat16, torch.float16)
_SCALARS = ("step", "grad_scaler")
_ALIGNMENT = 64  # elements: every tensor in a flat buffer starts on a 128-byte boundary in 16 bits


class Update(NamedTuple):
    """Results of one step, 0-d tensors on the device."""

    found_nonfinite: Tensor
    """bool: a NaN, an infinity, or ``skip_update`` of the caller; nothing has changed."""
    grad_norm: Tensor
    """fp64: L2 norm before clipping."""
    num_zeros: Tensor | None
    """int64: zeros in the gradients, if asked for."""


class OptimizerPart(NamedTuple):
    """Parameters that one rule updates and one set of ranks shares out."""

    rule: UpdateRule
    ranks: DataParallelGroups
    param_groups: list[dict[str, Any]]


class MegatronOptimizer:
    """Steps over every parameter of this rank's model chunks.

    Args:
        config: optimizer kind, clipping, loss scale, formats of the state.
        param_groups: as from ``parameter_groups``; their ``params`` are model parameters.
        model_chunks: whose gradient buffers ``zero_grad`` clears; wrapped for data parallelism, they say what this rank
            updates.
        grad_scaler: of fp16 training, else None.
        groups: this rank's process groups.
    """

    def __init__(
        self, config: OptimizerConfig, param_groups: Sequence[dict[str, Any]], model_chunks: Sequence[nn.Module],
        *, groups: ProcessGroups, grad_scaler: GradScaler | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.model_chunks = list(model_chunks)
        self.grad_scaler = grad_scaler
        self.groups = groups
        self.model_params: dict[str, nn.Parameter] = {}
        self.shards: dict[str, ParameterShard] = {}
        """What this rank updates, by name of the parameter; one of which it updates nothing is absent."""
        self.masters: dict[str, Master] = {}
        """Their exact values."""
        parallel = self._parallel_chunks()
        self.shares_update = any(chunk.shares_update for chunk in parallel)
        """Whether data-parallel ranks each update a part of every parameter."""
        cut = [shards for chunk in parallel if (shards := chunk.parameter_shards()) is not None]
        shards = {key: shard for each in cut for key, shard in each.items()} if cut else None
        rates = {"lr": 0.0 if config.lr is None else config.lr, "weight_decay": config.weight_decay}
        self.param_groups = [{**rates, **group, **self._adopt(group, shards)} for group in param_groups]
        """A scheduler writes ``lr`` and ``weight_decay`` here."""
        if not self.model_params:
            raise UserError("the model has no parameter to train")
        self.parts = self._build_parts()
        self._counted = {
            ranks: [name for name in self.masters if self._is_counted(name, ranks)] for ranks in groups.data_parallel
        }
        """What this rank contributes to sums over the model, by the ranks that hold it."""
        self._allocate()
        self._steps = torch.zeros((), dtype=torch.float32, device=self.device)
        self._found_nonfinite = torch.zeros((), dtype=torch.bool, device=self.device)

    def _adopt(self, group: dict[str, Any], shards: dict[nn.Parameter, ParameterShard] | None) -> dict[str, Any]:
        """The names and parameters of what this rank updates of a group."""
        names = []
        for name, parameter in zip(group["names"], group["params"]):
            if name in self.model_params:
                raise ValueError(f"two parameters are called {name}: state is kept by name")
            self.model_params[name] = parameter
            shard = whole(parameter) if shards is None else shards.get(parameter)
            if shard is not None:
                self.shards[name] = shard
                split = self.config.store_param_remainders
                self.masters[name] = master_of(shard.values, shard.compute_dtype, split=split)
                names.append(name)
        return {"names": names, "params": [self.model_params[name] for name in names]}

    def _build_parts(self) -> list[OptimizerPart]:
        by_kind: dict[tuple[str, DataParallelGroups], list[dict[str, Any]]] = {}
        for group in self.param_groups:
            kind, is_expert = group.get("optimizer", self.config.optimizer), group.get("is_expert_parallel", False)
            by_kind.setdefault((kind, self.groups.expert if is_expert else self.groups.dense), []).append(group)
        return [
            OptimizerPart(build_update_rule(kind, self.config, self._masters_of(own)), ranks, own)
            for (kind, ranks), own in by_kind.items()
        ]

    def _masters_of(self, param_groups: Sequence[dict[str, Any]]) -> list[Master]:
        return [self.masters[name] for group in param_groups for name in group["names"]]

    def _is_counted(self, name: str, ranks: DataParallelGroups) -> bool:
        spec = getattr(self.model_params[name], "spec", None)
        return data_parallel_groups(spec, self.groups) == ranks and is_counted_here(spec, self.groups)

    @torch.no_grad()
    def _allocate(self) -> None:
        """All state, so that memory use and state names do not depend on the first step: a flat buffer per kind."""
        masters = self.masters
        kept = {name: master.kept_dtype for name, master in masters.items() if master.kept_dtype is not None}
        for name, memory in self._flat(kept).items():
            masters[name].kept = memory
            masters[name].refresh()
        self.moments: dict[str, dict[str, Tensor]] = {}
        """Kind of moment, then name."""
        for part in self.parts:
            own = {name: masters[name].dtype for group in part.param_groups for name in group["names"]}
            for kind, dtype in part.rule.moment_dtypes.items():
                wanted = {name: dtype if master == torch.float32 else master for name, master in own.items()}
                self.moments.setdefault(kind, {}).update(self._flat(wanted))

    def _flat(self, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
        """Zeros of the shapes of the masters called so, contiguous by dtype."""
        views: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(dtypes.values()):
            weights = {name: self.masters[name].weight for name in dtypes if dtypes[name] == dtype}
            sizes = [-(-weight.numel() // _ALIGNMENT) * _ALIGNMENT for weight in weights.values()]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
            for (name, weight), place in zip(weights.items(), flat.split(sizes)):
                views[name] = place[: weight.numel()].view(weight.shape)
        return views

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.model_params.values())).device

    @property
    def step_count(self) -> int:
        """Updates made. Waits for the device."""
        return int(self._steps.item())

    @property
    def found_nonfinite(self) -> bool:
        """Whether the last step met a NaN or an infinity, and therefore changed nothing. Waits for the device."""
        return bool(self._found_nonfinite.item())

    def get_loss_scale(self) -> float:
        """1.0 without a scaler."""
        return self.grad_scaler.scale if self.grad_scaler else 1.0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call backward on, scaled."""
        return loss * self.grad_scaler.scale if self.grad_scaler else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradient buffers, and ``grad`` of every parameter (kept as zeros unless ``set_to_none``)."""
        for chunk in self.model_chunks:
            if isinstance(chunk, DataParallel):
                chunk.zero_grad_buffer()
        for parameter in self.model_params.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def step(self, gradient_factor: Tensor | None = None) -> tuple[bool, float | None, int | None]:
        """(whether weights changed, gradient norm before clipping, zeros in the gradients if asked for).

        A NaN or infinite gradient anywhere changes nothing on any rank: the loss scale backs off, ``found_nonfinite``
        is set, and the result is (False, None, None). Waits for the device: see :meth:`update`.
        """
        update = self.update(gradient_factor=gradient_factor)
        if bool(update.found_nonfinite):
            return False, None, None
        return True, float(update.grad_norm), None if update.num_zeros is None else int(update.num_zeros)

    @torch.no_grad()
    def update(self, skip_update: Tensor | None = None, gradient_factor: Tensor | None = None) -> Update:
        """:meth:`step` without waiting for the device (but with a dynamic loss scale, which the host keeps).

        Args:
            skip_update: a bool on the device; True changes nothing, like a NaN in the gradients.
            gradient_factor: a scalar on the device that the gradients still have to be multiplied by; done in the pass
                that reads them anyway.
        """
        for chunk in self._parallel_chunks():
            chunk.finish_param_sync()  # what is about to be written may still be on its way from the last step
        grads = self._gradients()
        unscale: Tensor | float | None = gradient_factor
        if self.grad_scaler is not None:
            unscale = (1.0 if unscale is None else unscale) / self.grad_scaler.scale
        norm = self._norm(grads)
        if unscale is not None:
            norm = norm * unscale  # the norm, not the gradients: they are multiplied in the pass that reads them anyway
        # the norm has the same bits on all ranks and is not finite if any gradient is not: ranks agree without asking
        found = ~norm.isfinite()
        if skip_update is not None:
            found = found | skip_update
        num_zeros = self._count_zeros(grads) if self.config.log_num_zeros_in_grad else None
        self._found_nonfinite = found
        skip = found.to(torch.float32)
        conditions = Conditions(self._steps + 1.0, skip, self._factor(norm, found, unscale))
        for part in self.parts:
            part.rule.update(self._update_groups(part, grads), conditions)
        self._steps += 1.0 - skip  # on the device: a host that asked would wait for the whole backward pass
        if isinstance(self.grad_scaler, DynamicGradScaler):
            self.grad_scaler.update(bool(found))
        for chunk in self._parallel_chunks():
            chunk.start_param_sync()
        return Update(found, norm, num_zeros)

    def _factor(self, norm: Tensor, found: Tensor, unscale: Tensor | float | None) -> Tensor | None:
        """Factor of the gradients; None where nothing can change them."""
        if self.config.clip_grad > 0.0:
            clip = clip_coefficient(norm, self.config.clip_grad)
            clip = torch.where(found, 1.0, clip)  # no NaN gets into the gradients
            return clip if unscale is None else clip * unscale
        return None if unscale is None else torch.ones_like(norm) * unscale

    def _update_groups(self, part: OptimizerPart, grads: dict[str, Tensor]) -> list[UpdateGroup]:
        kinds = [self.moments[kind] for kind in part.rule.moment_dtypes]

        def updated(name: str) -> Updated:
            return Updated(self.masters[name], grads[name], tuple(kind[name] for kind in kinds))

        return [
            UpdateGroup([updated(name) for name in group["names"] if name in grads], group["lr"], group["weight_decay"])
            for group in part.param_groups
        ]

    def _parallel_chunks(self) -> list[DataParallel]:
        return [chunk for chunk in self.model_chunks if isinstance(chunk, DataParallel)]

    def _gradients(self) -> dict[str, Tensor]:
        """By name, in the dtype in which they were added up; live."""
        grads = ((name, shard.gradient()) for name, shard in self.shards.items())
        return {name: grad.detach() for name, grad in grads if grad is not None}

    def gradient_shards(self) -> Iterator[ShardedTensor]:
        """What this rank uses of the gradients, as rectangles under global names; live views.

        After ``finalize_model_grads``: the gradients of the global batch (times the loss scale, if there is one, and
        without the factor that ``update`` may be given). After ``step`` they may have been clipped, and unscaled, in
        place. Copies of one element (over tensor-parallel ranks that replicate a parameter, data-parallel ranks without
        sharding) come from each of their ranks.
        """
        yield from self._sharded("", self._gradients()).values()

    def _shares(self, tensors_of: Callable[[str], Iterable[Tensor]]) -> Iterator[Share]:
        """What ``tensors_of`` gives for each name, every unique element of the model exactly once, with the groups to
        sum over: the same ones on all ranks, whichever parameters they hold."""
        for ranks in self.groups.data_parallel:
            tensors = (tensor for name in self._counted[ranks] for tensor in tensors_of(name))
            yield tensors, (ranks.shard, ranks.model) if self.shares_update else (ranks.model,)

    def _norm(self, grads: dict[str, Tensor]) -> Tensor:
        """Global L2 norm of the gradients; padding has none."""
        return l2_norm(self._shares(lambda name: [grads[name]] if name in grads else []), self.device)

    def _count_zeros(self, grads: dict[str, Tensor]) -> Tensor:
        """Zeros among the gradients, without those of padding."""

        def tensors_of(name: str) -> Iterator[Tensor]:
            if name in grads:
                shard = self.shards[name]
                spec = spec_or_replicated(shard.parameter)
                for _, piece in flat_pieces(spec, self.groups, (shard.start, shard.stop), grads[name]):
                    yield piece

        return count_zeros(self._shares(tensors_of), self.device)

    @torch.no_grad()
    def params_norm_on_device(self) -> Tensor:
        """Global L2 norm of the exact values, a 0-d fp64 tensor on the device."""
        return l2_norm(self._shares(lambda name: [self.masters[name].read()]), self.device)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """After the model's weights changed from outside (a checkpoint without optimizer state): main := model."""
        for master in self.masters.values():
            master.refresh()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """``{"exp_avg": {name: tensor}, "exp_avg_sq": {…}, "main_param": {…}, "step": int, "grad_scaler": {…}}``.

        The tensors are the live ones of what this rank updates (``shards``), but for masters kept in two parts, which
        are put together. SGD has ``momentum_buffer`` in place of the moments. ``main_param`` holds only parameters that
        the model computes with in half precision.
        """
        mains = {name: master.read() for name, master in self.masters.items() if self._has_main_param(name)}
        scaler = self.grad_scaler.state_dict() if self.grad_scaler else {}
        return {**self.moments, "main_param": mains, "step": self.step_count, "grad_scaler": scaler}

    def _has_main_param(self, name: str) -> bool:
        return self.shards[name].compute_dtype in HALF

    def replicas(self) -> Iterator[ShardedTensor]:
        """Moments and main parameters, for ``check_replicas``: ``exp_avg:`` + global parameter name …"""
        for key, named in self._state_tensors(self.state_dict()):
            yield from self._sharded(f"{key}:", named).values()

    def sharded_tensors(
        self, prefix: str = "optimizer.", state: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """The tensors of ``state``, by default of :meth:`state_dict`, as rectangles called prefix + ``exp_avg.`` +
        global parameter name. Who fills them calls :meth:`load_state_dict` with that state."""
        tensors: dict[str, ShardedTensor] = {}
        for key, named in self._state_tensors(self.state_dict() if state is None else state):
            tensors |= self._sharded(f"{prefix}{key}.", named)
        return tensors

    def _state_tensors(self, state: dict[str, Any]) -> list[tuple[str, dict[str, Tensor]]]:
        return [(key, named) for key, named in state.items() if key not in _SCALARS]

    def _sharded(self, prefix: str, named: dict[str, Tensor]) -> dict[str, ShardedTensor]:
        """What this rank updates of each parameter, given values in the order of its memory, as rectangles."""
        tensors: dict[str, ShardedTensor] = {}
        for name, tensor in named.items():
            shard = self.shards[name]
            tensors |= stretch_tensors(
                name, tensor, shard.parameter, (shard.start, shard.stop), prefix=prefix, groups=self.groups
            )
        return tensors

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; ``ValueError`` lists all missing and unknown names before anything changes."""
        check_names(self.state_dict(), state_dict)
        for kind, tensors in self.moments.items():
            for name, tensor in tensors.items():
                if tensor is not state_dict[kind][name]:
                    tensor.copy_(state_dict[kind][name])
        for name, master in self.masters.items():
            if self._has_main_param(name):
                master.write(state_dict["main_param"][name])
        self._steps.fill_(float(state_dict["step"]))
        if self.grad_scaler and state_dict["grad_scaler"]:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        for chunk in self._parallel_chunks():
            chunk.start_param_sync()


def check_names(live: dict[str, Any], stored: dict[str, Any]) -> None:
    """``ValueError`` naming every entry that only one of two optimizer states has."""
    problems = []
    for key in sorted(set(live) | set(stored)):
        if key not in stored or key not in live:
            problems.append(f"{key} is {'missing' if key not in stored else 'unknown'}")
        elif key not in _SCALARS:
            problems += [f"{key}.{name} is missing" for name in sorted(set(live[key]) - set(stored[key]))]
            problems += [f"{key}.{name} is unknown" for name in sorted(set(stored[key]) - set(live[key]))]
    if problems:
        raise UserError(f"the optimizer state does not fit this model and optimizer: {'; '.join(problems)}")
