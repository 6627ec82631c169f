"""The optimizer step: gradient norm and overflow check, then clip, update and round in one pass (``update_rules``).
Gradients are read from ``parameter.main_grad`` (see ``core/distributed``), or from ``parameter.grad`` if unset.

An optimizer is a list of parts. Each part has one update rule, one set of data-parallel groups, and parameter groups;
for example AdamW next to another rule, or dense parameters next to experts. The gradient norm, clipping and skipping
apply to all parts together.

The update works on *master weights*, the exact values of a ``Storage`` (``fusions/storage``). If the model's weights
are fp32 or fp64, these are the masters. For a half-precision model a master is an fp32 copy, or the model weight plus a
16-bit remainder; a parameter may declare another storage. If the optimizer state is sharded (distributed optimizer,
FSDP), masters exist only for this rank's shards (``ParameterShard``); the update is otherwise the same.

A step needs no host sync: the device decides from the finiteness of the gradient norm whether to apply the update, and
:meth:`MegatronOptimizer.update` returns device tensors.

State is stored by global parameter name, so that saving, comparing and loading do not depend on any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core.config.errors import UserError, listed
from megatron.core.distributed.data_parallel import DataParallel, UpdatedGathers, weight_updates
from megatron.core.distributed.reductions import all_reduce
from megatron.core.fusions.storage import Storage, build_storage
from megatron.core.groups.process_groups import DataParallelGroups, ProcessGroups
from megatron.core.host_memory import HostMemory
from megatron.core.optimizer.clip_grads import Share, clip_coefficient, count_zeros, l2_norm
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.host_state import HostState, flat_zeros, select_offloaded
from megatron.core.optimizer.megatron_names import MegatronNames
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import Conditions, Entry, RuleFactory, UpdateRule, find_rule
from megatron.core.optimizer.weight_edits import RowScaling, WeightEdit
from megatron.core.sharding.flat_pieces import flat_pieces
from megatron.core.sharding.parameter_shard import ParameterShard, full_shard
from megatron.core.sharding.placement import counts_on_this_rank, data_parallel_groups, spec_or_replicated
from megatron.core.sharding.sharded_tensor import ShardedTensor, flat_range_tensors

GradScaler = ConstantGradScaler | DynamicGradScaler
_SCALARS = ("step", "grad_scaler")


class Update(NamedTuple):
    """Results of one step, 0-d tensors on the device."""

    found_nonfinite: Tensor
    """bool: whether the step was skipped, for a NaN or infinity in the gradients or by the caller's ``skip_update``."""
    grad_norm: Tensor
    """fp64: L2 norm of the gradients after unscaling (loss scale) and before clipping."""
    num_zeros: Tensor | None
    """int64: zero gradient elements; None without ``log_num_zeros_in_grad``."""


class OptimizerPart(NamedTuple):
    """Parameter groups with the same update rule and the same data-parallel groups."""

    rule: UpdateRule
    ranks: DataParallelGroups
    param_groups: list[dict[str, Any]]


class MegatronOptimizer(MegatronNames):
    """Mixed-precision, optionally sharded optimizer over the parameters of this rank's model chunks. The constructor
    allocates all state and copies fp32 masters from the model. ``param_groups``: as returned by ``parameter_groups``;
    copied and reduced to the parameters that this rank updates. Data-parallel wrappers of ``model_chunks`` define the
    shards; ``zero_grad`` clears their gradient buffers, and ``update`` starts their weight all-gather. UserError if no
    parameter of any pipeline stage is trainable, ValueError for two parameters with the same name."""

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
        """This rank's shard of each parameter, by name; parameters without a local shard are absent."""
        self.storage: dict[str, Storage] = {}
        """Storage of the shards, by name; it reads and writes the master weights."""
        parallel = self._parallel_chunks()
        self.shards_optimizer = any(chunk.shards_optimizer for chunk in parallel)
        """Whether optimizer state is sharded over data-parallel ranks."""
        cut = [shards for chunk in parallel if (shards := chunk.parameter_shards()) is not None]
        shards = {key: shard for chunk_shards in cut for key, shard in chunk_shards.items()} if cut else None
        rates = {"lr": 0.0 if config.lr is None else config.lr, "weight_decay": config.weight_decay}
        param_groups = param_groups or [{"names": [], "params": []}]  # a stage of a pipeline may be frozen
        self.param_groups = [{**rates, **group, **self._adopt(group, shards)} for group in param_groups]
        """Parameter groups, with local shards only; the scheduler writes their ``lr`` and ``weight_decay``."""
        self._check_parameters()
        self.parts = self._build_parts()
        self.weight_edits: list[WeightEdit] = []
        """Called after each update, before weights are gathered."""
        self.counted_names = {
            ranks: [name for name in self.storage if self._is_counted(name, ranks)] for ranks in groups.data_parallel
        }
        """Names that this rank contributes to sums over the model, by data-parallel groups of the parameter."""
        self._copied_names = {
            ranks: [name for name in self.storage if self._has_groups(name, ranks) and name not in counted]
            for ranks, counted in self.counted_names.items()
        }
        """Names that another rank contributes: replicated weights outside of TP rank 0, tied copies."""
        self._allocate()
        names = {self.model_params[name]: name for name in self.storage}
        self._scale_rows = RowScaling(names, self.shards, self.host_state)
        # fp32, as torch's fused kernels require; exact up to 2^24 updates
        self._steps = torch.zeros((), dtype=torch.float32, device=self.device)
        self._found_nonfinite = torch.zeros((), dtype=torch.bool, device=self.device)
        self._start_payload_sync()

    def _check_parameters(self) -> None:
        """Raise UserError if no stage of the pipeline has a parameter to train. Collective over ``pp``."""
        num_trained = torch.tensor(len(self.model_params), device=self.device)
        if self.groups.pp.size > 1:
            all_reduce(num_trained, self.groups.pp).wait()
        if not num_trained:
            raise UserError("the model has no parameter to train")

    def _adopt(self, group: dict[str, Any], shards: dict[nn.Parameter, ParameterShard] | None) -> dict[str, Any]:
        """Register the parameters of ``group``, with a shard and master of each that this rank updates at least partly;
        return ``names`` and ``params`` of these. ``shards`` None: full parameters."""
        names = []
        for name, parameter in zip(group["names"], group["params"]):
            if name in self.model_params:
                raise ValueError(f"two parameters are called {name}: state is kept by name")
            self.model_params[name] = parameter
            shard = full_shard(parameter) if shards is None else shards.get(parameter)
            if shard is not None:
                self.shards[name] = shard
                split, declared = self.config.store_param_remainders, spec_or_replicated(parameter).storage
                shard.storage = build_storage(shard.values, shard.compute_dtype, split=split, declared=declared)
                self.storage[name] = shard.storage
                names.append(name)
        return {"names": names, "params": [self.model_params[name] for name in names]}

    def _build_parts(self) -> list[OptimizerPart]:
        by_kind: dict[tuple[RuleFactory, DataParallelGroups], list[dict[str, Any]]] = {}
        for group in self.param_groups:
            kind, is_expert = find_rule(group.get("optimizer", self.config.optimizer)), group.get("is_expert_parallel")
            by_kind.setdefault((kind, self.groups.expert if is_expert else self.groups.dense), []).append(group)
        return [
            OptimizerPart(self._build_rule(kind, [name for group in groups for name in group["names"]]), ranks, groups)
            for (kind, ranks), groups in by_kind.items()
        ]

    def _build_rule(self, kind: RuleFactory, names: Sequence[str]) -> UpdateRule:
        """Raises UserError if the rule owns matrices and a shard is a part, unless the parameter declares it."""
        rule = kind(self.config, [self.storage[name] for name in names])
        declared = [name for name in names if spec_or_replicated(self.model_params[name]).owns_matrices]
        cut = [name for name in names if not self.shards[name].is_full and name not in declared]
        if rule.owns == "matrices" and cut:
            raise UserError(
                f"{type(rule).__name__}: updates full matrices, but shards cut {listed(cut, most=4)}; declare it "
                "before the model is wrapped: declare(parameter, update_rule=...)"
            )
        return rule

    def _start_payload_sync(self) -> None:
        """All-gather the weights if a parameter declares a storage, which may round them."""
        # all parameters, not only those with a shard here: every data-parallel rank must take part
        if any(spec_or_replicated(parameter).storage is not None for parameter in self.model_params.values()):
            for chunk in self._parallel_chunks():
                chunk.start_param_sync()

    def _has_groups(self, name: str, ranks: DataParallelGroups) -> bool:
        return data_parallel_groups(getattr(self.model_params[name], "spec", None), self.groups) == ranks

    def _is_counted(self, name: str, ranks: DataParallelGroups) -> bool:
        spec = getattr(self.model_params[name], "spec", None)
        return self._has_groups(name, ranks) and counts_on_this_rank(spec, self.groups)

    @torch.no_grad()
    def _allocate(self) -> None:
        """Allocate masters' extra storage and zero moments in flat buffers, one per kind and dtype, before the first
        step: memory use and state names do not change during training."""
        storages = self.storage
        config, self._memory = self.config, HostMemory(self.device)
        weights = {name: storage.weight for name, storage in storages.items()}
        fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        parameters = (parameter for chunk in self.model_chunks for parameter in chunk.parameters())
        order = {parameter: index for index, parameter in enumerate(parameters)}
        names = sorted(storages, key=lambda name: order.get(self.model_params[name], len(order)))
        sizes = {name: self.shards[name].max_elements for name in names}
        offloaded = select_offloaded(sizes, fraction)
        extra = {name: storage.kept_dtype for name, storage in storages.items() if storage.kept_dtype is not None}
        for name, memory in flat_zeros(extra, weights, offloaded, self._memory).items():
            storages[name].kept = memory
        self.moments: dict[str, dict[str, Tensor]] = {}
        """Moments by kind ("exp_avg"), then by parameter name; in host memory if offloaded."""
        rules = []
        for part in self.parts:
            masters = {name: storages[name].dtype for group in part.param_groups for name in group["names"]}
            for kind, dtype in part.rule.moment_dtypes.items():
                dtypes = {name: dtype if master == torch.float32 else master for name, master in masters.items()}
                self.moments.setdefault(kind, {}).update(flat_zeros(dtypes, weights, offloaded, self._memory))
            rules.append((part.rule, [name for name in names if name in masters]))
        overlap = bool(offloaded) and config.overlap_cpu_optimizer_d2h_h2d
        # matrices need much memory for their updates, which a side stream would not share with the forward pass
        elements = all(part.rule.owns == "elements" for part in self.parts)
        self._updates = weight_updates(self.model_chunks, self.device, overlaps=overlap and elements)
        self.host_state = HostState(
            rules, storages, self.moments, sizes, offloaded, device=self.device, updates=self._updates,
            overlap=overlap,
        )  # fmt: skip
        for name in extra:
            with self.host_state.opened(name) as storage:
                storage.refresh()

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(parameter for chunk in self.model_chunks for parameter in chunk.parameters()).device

    @property
    def saves_masters(self) -> bool:
        """Whether a checkpoint holds master weights of this rank's shards next to the weights."""
        return any(storage.saves_master for storage in self.storage.values())

    @property
    def step_count(self) -> int:
        """Number of applied updates; skipped steps do not count. Waits for the device."""
        return int(self._steps.item())

    @property
    def found_nonfinite(self) -> bool:
        """Whether the last step was skipped (NaN, infinity or ``skip_update``). Waits for the device."""
        return bool(self._found_nonfinite.item())

    def get_loss_scale(self) -> float:
        """Return the current loss scale; 1.0 without a scaler."""
        return self.grad_scaler.scale if self.grad_scaler else 1.0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale; call backward on the result."""
        return loss * self.grad_scaler.scale if self.grad_scaler else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradient buffers of all data-parallel wrappers, and free ``grad`` of every parameter.
        ``set_to_none`` False zeroes an existing ``grad`` instead, but wrappers free it anyway."""
        for chunk in self.model_chunks:
            if isinstance(chunk, DataParallel):
                chunk.zero_grad_buffer()
        for parameter in self.model_params.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def step(self) -> tuple[bool, float | None, int | None]:
        """Run one step; return (whether weights changed, gradient norm before clipping, number of zero gradients). The
        last is None without ``log_num_zeros_in_grad``. A NaN or infinite gradient on any rank skips the step on all
        ranks: the loss scale backs off, ``found_nonfinite`` is set, and the result is (False, None, None). Collective.
        Waits for the device; :meth:`update` does not."""
        update = self.update()
        if bool(update.found_nonfinite):
            return False, None, None
        return True, float(update.grad_norm), None if update.num_zeros is None else int(update.num_zeros)

    @torch.no_grad()
    def update(self, skip_update: Tensor | None = None) -> Update:
        """Run one step without a host sync, except with a dynamic loss scale, which the host updates. Waits (in stream
        order) for weight all-gathers, computes norm and overflow, updates weights and state unless skipped (also by
        ``skip_update``, a bool device tensor), then starts the all-gather of updated weights. Collective. May scale
        gradients in place, also if skipped: gradients are invalid afterwards."""
        for chunk in self._parallel_chunks():
            chunk.finish_gathers()  # the last step's all-gather may still write the weights that are updated here
        grads = self.local_gradients()
        unscale = None if self.grad_scaler is None else 1.0 / self.grad_scaler.scale
        norm = self._norm(grads)
        if unscale is not None:
            norm = norm * unscale  # scale the norm only; the update scales the gradients, which saves a pass over them
        # the all-reduced norm is bit-identical on all ranks and non-finite if any gradient is: all ranks decide equally
        nonfinite = ~norm.isfinite()
        if skip_update is not None:
            nonfinite = nonfinite | skip_update
        num_zeros = self._count_zeros(grads) if self.config.log_num_zeros_in_grad else None
        self._found_nonfinite = nonfinite
        skip = nonfinite.to(torch.float32)
        conditions = Conditions(self._steps + 1.0, skip, self._factor(norm, nonfinite, unscale))
        parts = [(part.rule, self._entries(part, grads)) for part in self.parts]
        gathers_early = self._updates.overlaps and not self.weight_edits
        gathers = UpdatedGathers(
            self._parallel_chunks() if gathers_early else (),
            (entry.shard.parameter for _, entries in parts for entry in entries),
        )
        self.host_state.update(parts, conditions, gathers.advance)
        for edit in self.weight_edits:
            edit(self._scale_rows, nonfinite)
        self._mark_changed_weights()
        self._steps += 1.0 - skip  # on the device: a host counter would need a sync with the full backward pass
        if isinstance(self.grad_scaler, DynamicGradScaler):
            self.grad_scaler.update(bool(nonfinite))
        for chunk in self._parallel_chunks() if not gathers_early else ():
            chunk.start_param_sync()
        return Update(nonfinite, norm, num_zeros)

    def _mark_changed_weights(self) -> None:
        """torch does not notice writes of kernels and gathers: fp8 copies would stay old."""
        for chunk in self.model_chunks:
            torch.autograd.graph.increment_version(list(chunk.parameters()))

    def _factor(self, norm: Tensor, nonfinite: Tensor, unscale: Tensor | float | None) -> Tensor | None:
        if self.config.clip_grad > 0.0:
            clip = clip_coefficient(norm, self.config.clip_grad)
            clip = torch.where(nonfinite, 1.0, clip)  # a NaN norm must not spread into the gradients
            return clip if unscale is None else clip * unscale
        return None if unscale is None else torch.ones_like(norm) * unscale

    def _entries(self, part: OptimizerPart, grads: dict[str, Tensor]) -> list[Entry]:
        """Return the entries of all names of ``part`` with a gradient, in the order of the parameter groups."""
        copies = part.ranks.replica if self.shards_optimizer else part.ranks.reduce
        entries = []
        for group in part.param_groups:
            lr, decay, eps = group["lr"], group["weight_decay"], group.get("eps")
            for name in group["names"]:
                if name in grads:
                    moments = tuple(self.moments[kind][name] for kind in part.rule.moment_dtypes)
                    storage, shard = self.storage[name], self.shards[name]
                    ranks, gradient = self.groups, grads[name]
                    entries.append(Entry(storage, gradient, moments, lr, decay, name, shard, ranks, copies, eps))
        return entries

    def gather_exact_weights(self) -> None:
        """Complete the model's weights on every rank, not only rounded copies. Collective."""
        for chunk in self._parallel_chunks():
            chunk.gather_exact_weights()

    def _parallel_chunks(self) -> list[DataParallel]:
        return [chunk for chunk in self.model_chunks if isinstance(chunk, DataParallel)]

    def local_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the shards by name, as live views in the accumulation dtype. Names without a gradient
        (unused parameters without ``main_grad``) are omitted, and the update leaves them as they are."""
        grads = ((name, shard.gradient()) for name, shard in self.shards.items())
        return {name: grad.detach() for name, grad in grads if grad is not None}

    def gradient_shards(self) -> Iterator[ShardedTensor]:
        """Yield the gradients of this rank's shards as rectangles under global names; live views. After
        ``finalize_model_grads`` they are those of the global batch, times the loss scale. ``step`` may unscale and clip
        them in place. Replicated elements are yielded by every rank that holds them."""
        yield from self._sharded("", self.local_gradients()).values()

    def _shares(self, find_tensors: Callable[[str], Iterable[Tensor]]) -> Iterator[Share]:
        """Yield ``find_tensors(name)`` for the names that this rank contributes, with the groups to sum over: each
        element of the model exactly once. All ranks yield the same groups in the same order."""
        for ranks in self.groups.data_parallel:
            tensors = (tensor for name in self.counted_names[ranks] for tensor in find_tensors(name))
            yield tensors, (ranks.shard, ranks.model) if self.shards_optimizer else (ranks.model,)

    def _norm(self, grads: dict[str, Tensor]) -> Tensor:
        """Return the global L2 norm of the scaled gradients (0-d fp64), not finite if any is not. Collective."""
        # copies are read too: the rank that counts them reads as much, and all ranks wait for it in the all-reduce
        copies = ([grads[name] for name in names if name in grads] for names in self._copied_names.values())
        return l2_norm(self._shares(lambda name: [grads[name]] if name in grads else []), self.device, copies)

    def _count_zeros(self, grads: dict[str, Tensor]) -> Tensor:
        """Return the number of zero gradient elements without padding (0-d int64). Collective; no host sync."""

        def find_tensors(name: str) -> Iterator[Tensor]:
            if name in grads:
                shard = self.shards[name]
                spec = spec_or_replicated(shard.parameter)
                for _, piece in flat_pieces(spec, self.groups, (shard.start, shard.stop), grads[name]):
                    yield piece

        return count_zeros(self._shares(find_tensors), self.device)

    @torch.no_grad()
    def params_norm_on_device(self) -> Tensor:
        """Return the L2 norm of all masters (0-d fp64). Collective; no host sync unless state is offloaded."""
        return l2_norm(self._shares(lambda name: [self.host_state.read(name)]), self.device)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copy the model's weights to the masters (a remainder becomes zero), after a checkpoint without optimizer
        state was loaded. Keeps moments and step. Collective if a parameter declares a storage, else not."""
        for name in self.storage:
            with self.host_state.opened(name) as storage:
                storage.refresh()
        self._start_payload_sync()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shards: ``{"exp_avg": {name: tensor}, "exp_avg_sq": {…}, "main_param": {…},
        "step": int, "grad_scaler": {…}}``. The tensors are live, except masters with 16-bit remainders; offloaded ones
        are in host memory. ``main_param`` contains only parameters whose weight is less exact than the master. Waits
        for the device."""
        self.host_state.settle()
        stored = [name for name, storage in self.storage.items() if storage.saves_master]
        mains = {name: self.host_state.read(name, on_host=True) for name in stored}
        scaler = self.grad_scaler.state_dict() if self.grad_scaler else {}
        return {**self.moments, "main_param": mains, "step": self.step_count, "grad_scaler": scaler}

    def replicas(self) -> Iterator[ShardedTensor]:
        """Yield this rank's optimizer state as rectangles named ``exp_avg:`` + global name. Waits for the device."""
        for key, named in self._state_tensors(self.state_dict()):
            yield from self._sharded(f"{key}:", named).values()

    def sharded_tensors(
        self, prefix: str = "optimizer.", state: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the tensors of ``state`` as rectangles named prefix + ``exp_avg.`` + global parameter name. ``state``
        defaults to a new :meth:`state_dict`. A loader that writes into these tensors must then call
        :meth:`load_state_dict` with the same ``state``."""
        tensors: dict[str, ShardedTensor] = {}
        for key, named in self._state_tensors(self.state_dict() if state is None else state):
            tensors |= self._sharded(f"{prefix}{key}.", named)
        return tensors

    def _state_tensors(self, state: dict[str, Any]) -> list[tuple[str, dict[str, Tensor]]]:
        return [(key, named) for key, named in state.items() if key not in _SCALARS]

    def _sharded(self, prefix: str, named: dict[str, Tensor]) -> dict[str, ShardedTensor]:
        """Convert tensors in the layout of this rank's shards to rectangles (views) of global tensors named ``prefix``
        + global name. A tensor gives up to a few rectangles; padding is omitted."""
        tensors: dict[str, ShardedTensor] = {}
        for name, tensor in named.items():
            shard = self.shards[name]
            tensors |= flat_range_tensors(
                name, tensor, shard.parameter, (shard.start, shard.stop), prefix=prefix, groups=self.groups
            )
        return tensors

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`, or the result of ``dist_checkpointing.load``; copies into the live tensors, and
        sets step and loss scale. Also writes the model weights that ``main_param`` has (not fp32 models) and starts the
        all-gather if the state is sharded. Waits for the device. Raises UserError for missing or unknown names (all are
        listed); nothing has changed then. Does not check shapes first."""
        state_dict = self.plain_state(state_dict)
        check_names(self.state_dict(), state_dict)
        for kind, tensors in self.moments.items():
            for name, tensor in tensors.items():
                if tensor is not state_dict[kind][name]:
                    tensor.copy_(state_dict[kind][name])
        for name, main in state_dict["main_param"].items():
            with self.host_state.opened(name) as storage:
                storage.write(main.to(self.device))
        self._mark_changed_weights()
        self._steps.fill_(float(state_dict["step"]))
        if self.grad_scaler and state_dict["grad_scaler"]:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        for chunk in self._parallel_chunks():
            chunk.start_param_sync()


def check_names(live: dict[str, Any], stored: dict[str, Any]) -> None:
    """Raise UserError, with all names, if a parameter is only in ``live`` or only in ``stored``."""
    problems = []
    for key in sorted(set(live) | set(stored)):
        if key not in stored or key not in live:
            problems.append(f"{key} is {'missing' if key not in stored else 'unknown'}")
        elif key not in _SCALARS:
            problems += [f"{key}.{name} is missing" for name in sorted(set(live[key]) - set(stored[key]))]
            problems += [f"{key}.{name} is unknown" for name in sorted(set(stored[key]) - set(live[key]))]
    if problems:
        raise UserError(f"the optimizer state does not fit this model and optimizer: {'; '.join(problems)}")


serve_other_names(__name__)
