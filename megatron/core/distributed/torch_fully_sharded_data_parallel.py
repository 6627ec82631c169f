"""Fully sharded data parallelism with torch's ``fully_shard`` (FSDP2, ZeRO-3).

Each layer is one FSDP unit, and so is the output layer, and the rest of the model: its weights are all-gathered before
it runs and freed afterwards (Zhao et al. 2023); the last two are freed after the last micro-batch. Trained weights are
stored as fp32 shards and gathered in the compute dtype, frozen ones are stored in it. The gradients of every
micro-batch are reduce-scattered and accumulated in fp32 shards. They are summed, as in ``DistributedDataParallel``;
nothing divides by the number of ranks.

With several optimizer instances weights are sharded within an instance and replicated over instances (HSDP). Expert
parameters are sharded over the expert-data-parallel ranks. This requires modules that hold expert parameters only;
each such module is a separate unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.config.errors import UserError, listed
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.fp8.fully_sharded import ScalesOfShards, shard_in_fp8
from megatron.core.fp8.recipe import fp8_gemms
from megatron.core.fp8.storage import fp8_copy
from megatron.core.fusions.storage import HALF
from megatron.core.groups.process_groups import DataParallelGroups, ProcessGroups
from megatron.core.sharding.flat_pieces import flat_range
from megatron.core.sharding.named_slices import stored_parameters
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import data_parallel_groups, spec_or_replicated


class TorchFullyShardedDataParallel(DataParallel):
    """``module`` (one chunk, on its device) sharded over at least two data- and context-parallel ranks, in place:
    trained half-precision parameters become fp32 ``DTensor`` shards; ``parameter.compute_dtype`` keeps the dtype that
    the model computes in. ``layers``: submodules that become one FSDP unit each, outermost last, and so does ``last``,
    which runs after them; the rest is another unit. ``reshard_after_forward``: whether to free a layer's full weights
    between forward and backward. UserError for a single rank, parameters of several dtypes, a declared storage, a
    module with both dense and expert parameters directly, or one optimizer instance per rank."""

    def __init__(
        self, ddp_config: DistributedDataParallelConfig, module: nn.Module, layers: Iterable[nn.Module],
        groups: ProcessGroups, *, reshard_after_forward: bool = True, last: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, groups)
        if groups.dp_cp.size == 1:
            raise UserError("fully sharded data parallelism needs at least two data-parallel ranks")
        self.ddp_config = ddp_config
        self.shards_optimizer = True
        specs = {name: getattr(parameter, "spec", None) for name, parameter in stored_parameters(module)}
        copies = {name: copy for name, p in stored_parameters(module) if (copy := fp8_copy(p)) is not None}
        specs |= {name: replace(spec, storage=None) for name in copies if (spec := specs[name]) is not None}
        declared = [name for name, spec in specs.items() if spec is not None and spec.storage is not None]
        if declared:
            raise UserError(
                f"fully sharded data parallelism: declared storages ({listed(declared, most=4)}) are not supported; "
                "use --use-distributed-optimizer"
            )
        compute_dtype = _the_dtype(module)
        policy = _precision(compute_dtype, ddp_config)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dtype in HALF and parameter.requires_grad:
                    parameter.data = parameter.data.float()
        in_fp8 = shard_in_fp8(module, groups.dense.shard.size)
        for gemms in fp8_gemms(module):
            gemms.keeps_weights, gemms.weights = False, ()  # weights exist only while a unit is gathered
        device = next(module.parameters()).device
        mesh = _mesh(groups.dense, device)
        units = [(layer, mesh) for layer in layers]
        # inner units first: fully_shard skips parameters that already belong to the unit of a submodule
        if groups.expert != groups.dense and (experts := _expert_modules(module)):
            units = [*zip(experts, [_mesh(groups.expert, device)] * len(experts)), *units]
        for unit, over in units:
            fully_shard(unit, mesh=over, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        self._kept: list[FSDPModule] = []  # gathered until the backward pass in any case
        for rest in (module,) if last is None else (last, module):
            self._kept.append(fully_shard(rest, mesh=mesh, mp_policy=policy, reshard_after_forward=False))
            self._kept[-1].set_reshard_after_backward(False, recurse=False)
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        # FSDP2 averages by default: ``finalize_model_grads`` divides by the tokens and needs the plain sum
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # ``fully_shard`` has replaced the parameters, which lost their attributes
        self._parameters_by_name = dict(stored_parameters(module))
        for name, parameter in self._parameters_by_name.items():
            parameter.compute_dtype = compute_dtype  # type: ignore[attr-defined]
            if specs[name] is not None:
                parameter.spec = specs[name]  # type: ignore[attr-defined]
        self._scales: ScalesOfShards | None = None
        if in_fp8:
            weights = [(copies[name], self._parameters_by_name[name]) for name in in_fp8]
            self._scales = scales = ScalesOfShards(weights, compute_dtype, groups.dense.shard)
            # registered after the hooks of fully_shard, so that it runs before them
            module.register_forward_pre_hook(lambda *_: scales.refresh(), prepend=True)

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters_by_name.values() if parameter.requires_grad]

    def parameter_shards(self) -> dict[nn.Parameter, ParameterShard] | None:
        """Map every trained parameter to this rank's shard, a flat range of full rows in local memory (fp32 for
        half-precision models). A parameter with fewer rows than ranks has no shard on the last ranks and is omitted
        there, except with an update rule that owns matrices: all ranks then take part in its collectives."""
        shards = {}
        for parameter in self._trained:
            local, start, stop = flat_range(parameter)
            spec = spec_or_replicated(parameter)
            if start < stop or spec.owns_matrices:
                dtype = parameter.compute_dtype  # type: ignore[attr-defined]
                gradient = partial(getattr, parameter, "main_grad", None)
                rows_over = data_parallel_groups(spec, self.groups).shard
                shards[parameter] = ParameterShard(parameter, start, stop, local, gradient, dtype, rows_over)
        return shards

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable the all-reduce over optimizer instances (HSDP) in backward; no effect with one instance. The
        reduce-scatter within an instance still runs for every micro-batch. Enabled again on exit."""
        self._set_all_reduce(False)
        try:
            yield
        finally:
            self._set_all_reduce(True)

    reduced_part = "FSDP unit"

    @contextmanager
    def local_gradients(self) -> Iterator[Callable[[], list[str]]]:
        self.zero_grad_buffer()
        names = {unit: name or "outside of layers" for name, unit in self.module.named_modules()}
        scatters = {names[unit]: ObservedReduceScatter() for unit in self._units}
        for unit in self._units:  # not undone: the run stops
            unit.set_custom_reduce_scatter(scatters[names[unit]])  # type: ignore[arg-type]

        def invalid() -> list[str]:
            states = {name: scatter.is_finite for name, scatter in scatters.items()}
            for name, parameter in self._parameters_by_name.items():
                gradient = parameter.grad
                if isinstance(gradient, DTensor) and gradient.device_mesh.size() == 1:  # no reduce-scatter
                    states[name] = gradient.to_local().isfinite().all()
            return [name for name, is_finite in states.items() if not bool(is_finite)]

        yield invalid

    def _set_all_reduce(self, enabled: bool) -> None:
        if self.groups.dp_cp_replica.size > 1:
            # the first unit is the root, and the setting applies to all units below it
            self._units[0].set_requires_all_reduce(enabled)

    def finish_grad_sync(self, *unused: Any) -> None:
        """Set ``main_grad`` to this rank's shard of the summed gradient (shares memory with ``grad``). A parameter
        without a gradient gets zeros. Starts no collective: backward has reduced already. Frees the weights that were
        kept for further micro-batches."""
        for unit in self._kept:
            unit.reshard()
        for parameter in self._trained:
            gradient = parameter.grad
            local = torch.zeros_like(flat_range(parameter)[0]) if gradient is None else flat_range(gradient)[0]
            parameter.main_grad = local  # type: ignore[attr-defined]

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply every gradient shard in place, after ``finish_grad_sync``, which sets ``main_grad``."""
        for parameter in self._trained:
            parameter.main_grad.mul_(scaling_factor)  # type: ignore[attr-defined]

    def zero_grad_buffer(self) -> None:
        """Free all gradients: set ``grad`` and ``main_grad`` to None."""
        for parameter in self._trained:
            parameter.grad = None
            parameter.main_grad = None  # type: ignore[attr-defined]

    def finish_param_sync(self) -> None:
        """Free all gathered weights, so that the shards may be written. No collective; call it on all ranks."""
        for unit in self._units:
            unit.reshard()
        self.start_param_sync()

    def start_param_sync(self) -> None:
        """Let the next forward pass compute the scales of fp8 weights again. No collective; call it on all ranks."""
        if self._scales is not None:
            self._scales.epoch.advance()


class ObservedReduceScatter:
    """Reduce-scatter of one FSDP unit, as torch's default, that looks at its inputs."""

    is_finite: Tensor | bool = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.is_finite = input_tensor.isfinite().all() & self.is_finite
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def _the_dtype(module: nn.Module) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) != 1:
        raise UserError(f"fully sharded data parallelism: parameters of several dtypes ({dtypes}) are not supported")
    return dtypes.pop()


def _precision(dtype: torch.dtype, config: DistributedDataParallelConfig) -> MixedPrecisionPolicy:
    """Half precision: compute in it, reduce in it or in fp32; other dtypes do not change. Inputs are not cast."""
    if dtype not in HALF:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    reduced = torch.float32 if config.grad_reduce_in_fp32 else dtype
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)


def _expert_modules(module: nn.Module) -> list[nn.Module]:
    """Return ``module`` if it holds expert parameters only, else its largest submodules that do. UserError for a module
    with direct dense and expert parameters: ``fully_shard`` takes a single mesh for them."""
    direct = {spec_or_replicated(parameter).is_expert for parameter in module.parameters(recurse=False)}
    if direct == {True, False}:
        raise UserError(
            f"fully sharded data parallelism: {type(module).__name__} holds dense and expert parameters, whose copies "
            "are on different ranks; move the experts' into a module of their own, or use --use-distributed-optimizer"
        )
    everything = {spec_or_replicated(parameter).is_expert for parameter in module.parameters()}
    if everything == {True}:
        return [module]
    return [experts for child in module.children() for experts in _expert_modules(child)]


def _mesh(ranks: DataParallelGroups, device: torch.device) -> DeviceMesh:
    if ranks.reduce.size == 1:  # a single copy of the experts: a mesh needs a process group even for one rank
        return DeviceMesh.from_group(dist.new_group(ranks.reduce.ranks, use_local_synchronization=True), device.type)
    if ranks.replica.size == 1:
        return DeviceMesh.from_group(ranks.shard.handle, device.type)
    grid = torch.tensor(ranks.reduce.ranks).view(ranks.replica.size, ranks.shard.size)
    if ranks.shard.size == 1:
        raise UserError("one optimizer instance per data-parallel rank leaves nothing to shard")
    return DeviceMesh.from_group(
        [ranks.replica.handle, ranks.shard.handle], device.type, grid, mesh_dim_names=("replicate", "shard")
    )
