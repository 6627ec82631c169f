"""Contiguous gradient buffers, split into buckets; one collective per bucket.

A :class:`ParamAndGradBuffer` holds the gradients of all parameters with the same dtypes and the same reduction group in
one flat tensor, in reverse creation order (the order in which backward produces gradients). ``parameter.main_grad`` is
a view into it. ``parameter.grad_ready`` is a 0-d leaf tensor: operators that accumulate into ``main_grad`` themselves
(``tensor_parallel/linear.py``) return a gradient for this leaf instead of for the parameter, which fires its hook.

With sharded optimizer state (ZeRO-1, Rajbhandari et al. 2020) each rank owns one contiguous range of every bucket.
Gradients are reduced into this range only. The weights live in a second flat tensor with the same layout, so that one
all-gather per bucket distributes the updated weights, or the payloads of their declared storage
(``fusions/storage.py``). If GEMMs read the payloads themselves, each rank keeps only its range of the weights; the rest
is made for state dicts, checkpoints and generation, and freed after the next all-gather. Parameters whose update rule
owns matrices have separate buffers, whose shards consist of full parameters.

The bucket layout depends only on the parameters, the bucket size and the number of shards. The order of summation, and
so the result, is therefore the same with and without overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.distributed.reductions import Reduction, all_reduce, local_shard
from megatron.core.fusions.storage import HALF, Storage
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.collective_names import all_gather
from megatron.core.groups.process_groups import Group
from megatron.core.sharding.buffer_layout import CutRule, cut_buffer
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import spec_or_replicated


@dataclass(frozen=True)
class BufferLayout:
    """Bucket sizes of a buffer, and the groups and collective that reduce it."""

    group: Group
    """Ranks over which gradients are summed. If ``sharded``, they also own the shards."""
    reduction: Reduction = all_reduce
    """Collective that reduces a bucket over ``group``."""
    sharded: bool = False
    """Whether each rank of ``group`` updates only its shard of every bucket."""
    replicas: Group = Group("dp_cp_replica")
    """Ranks of other optimizer instances with the same shard; their sums are all-reduced in a second step."""
    bucket_size: int | None = None
    """Minimum elements per bucket; None: a single bucket."""
    pad_for_bus: bool = False
    """Whether bucket sizes are multiples of 2^16 elements."""
    separate: Callable[[nn.Parameter], bool] = lambda parameter: False
    """Predicate for parameters that get a separate bucket, so that ranks with different other parameters shard them
    equally (tied embeddings)."""
    storage: type[Storage] | None = None
    """Declared storage of the weights; None: all-gathers send the weights."""


class BufferKind(NamedTuple):
    """Properties that all parameters of a buffer share."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    """Dtype of accumulation and reduction."""
    storage: type[Storage] | None
    """Declared storage; None: the optimizer chooses it, and all-gathers send the weights."""
    owns_matrices: bool
    """Whether shards consist of full parameters."""


class Bucket:
    """Contiguous range of a buffer that one collective reduces (and one all-gather of weights fills). ``grads`` is a
    flat view; ``weights`` a flat tensor of the same layout if the optimizer state is sharded, else None: parameters
    become views of it. ``places``: elements of each parameter in the bucket."""

    def __init__(
        self, grads: Tensor, weights: Tensor | None, places: dict[nn.Parameter, slice], layout: BufferLayout
    ) -> None:
        self.grads, self.layout = grads, layout
        self.parameters, self._places = list(places), places
        self.weights: Tensor | None = None
        """Flat weights of all ranks; None without sharding, and while only this rank's shards are kept (``_local``)."""
        self._local: Tensor
        self.shards: list[ParameterShard] = []
        """This rank's shards."""
        self.storage: type[Storage] | None = None
        if weights is not None:
            self._adopt(weights)
        self.is_exact = True
        """Whether weights outside of this rank's shards are up to date once gathers have finished."""
        self.pending = len(self.parameters)
        """Number of gradients of the last micro-batch that are not ready."""
        self.is_last = any(getattr(parameter, "has_several_gradients", False) for parameter in self.parameters)
        """Whether the reduction starts only after the backward pass. Needed for modules that run several times per
        forward: with recomputation or delayed weight gradients their hooks fire once per run, so that the count of
        ready gradients would be too high."""
        self.started = False
        self._sum: AsyncHandle | None = None
        self._gather: AsyncHandle | None = None
        self._has_copies = False
        """Whether GEMMs have gathered copies to read."""

    def reset(self) -> None:
        """Start an iteration: no gradient is ready. Frees weights that GEMMs do not read that were gathered."""
        self.pending = len(self.parameters)
        self._sum, self.started = None, False
        if self._has_copies and self._gather is None:  # else the end of the all-gather frees them, after the update
            self._free_weights()

    @property
    def owned(self) -> Tensor:
        """View of the gradients that this rank's optimizer reads: its shard, or the full bucket if unsharded."""
        return local_shard(self.grads, self.layout.group) if self.layout.sharded else self.grads

    @property
    def gathers(self) -> bool:
        """Whether updated weights are all-gathered."""
        return self.layout.sharded and self.layout.group.size > 1

    @torch.no_grad()
    def _adopt(self, weights: Tensor) -> None:
        for parameter, place in self._places.items():
            weights[place].view(parameter.shape).copy_(parameter)
        self.shards = list(self._make_shards(local_shard(weights, self.layout.group)))
        self._show(weights)
        kind = self.layout.storage
        if kind is None or kind.payload_bytes is None or not self.gathers:
            return
        shape = weights.numel() // kind.block, kind.payload_bytes
        self.storage, self.payloads = kind, torch.zeros(shape, dtype=torch.uint8, device=weights.device)
        for parameter, place in self._places.items():
            kind.adopt(parameter, self.payloads[place.start // kind.block : -(-place.stop // kind.block)])

    def _make_shards(self, local: Tensor) -> Iterable[ParameterShard]:
        """Yield non-empty shards in memory order; padding belongs to no shard."""
        low = self.layout.group.rank * local.numel()
        for parameter, place in self._places.items():
            start, stop = max(low, place.start), min(low + local.numel(), place.stop)
            if start < stop:
                yield self._shard(parameter, slice(start, stop), local[start - low : stop - low])

    def _shard(self, parameter: nn.Parameter, part: slice, values: Tensor) -> ParameterShard:
        grad, first = self.grads[part], self._places[parameter].start
        return ParameterShard(parameter, part.start - first, part.stop - first, values, lambda: grad, parameter.dtype)

    def _show(self, weights: Tensor | None) -> None:
        """Make the parameters views of gathered ``weights``. None: NaN in the memory of one element, so that a reader
        of weights that are not kept is noticed."""
        self.weights = weights
        for parameter, place in self._places.items():
            if weights is None:
                parameter.data = parameter.new_full((1,), torch.nan).expand(parameter.shape)
            else:
                parameter.data = weights[place].view(parameter.shape)

    def _keep(self, local: Tensor) -> None:
        low = self.layout.group.rank * local.numel()
        for shard in self.shards:
            first = self._places[shard.parameter].start + shard.start - low
            shard.values = local[first : first + shard.stop - shard.start]
            if shard.storage is not None:
                shard.storage.weight = shard.values.detach()

    @torch.no_grad()
    def _free_weights(self) -> None:
        self.is_exact = False
        if self.weights is not None:
            self._local = local_shard(self.weights, self.layout.group).clone()
            self._keep(self._local)
            self._show(None)

    @torch.no_grad()
    def _all_weights(self) -> Tensor:
        """At least this rank's shards are up to date."""
        if self.weights is None:
            weights = torch.zeros(self.grads.numel(), dtype=self._local.dtype, device=self._local.device)
            local = local_shard(weights, self.layout.group)
            local.copy_(self._local)
            self._keep(local)
            self._show(weights)
            del self._local
            return weights
        return self.weights

    def start_sum(self) -> None:
        """Start the in-place reduction over ``layout.group``, at most once per iteration. Until :meth:`wait` nothing
        may use the bucket; if sharded, only :attr:`owned` is valid afterwards."""
        assert not self.started, "a bucket was reduced twice in one iteration"
        self.started = True
        if self.layout.group.size > 1:
            self._sum = self.layout.reduction(self.grads, self.layout.group)

    def sum_replicas(self) -> None:
        """Wait for the reduction within the optimizer instance, then start the all-reduce over the instances."""
        self.wait()
        if self.layout.replicas.size > 1:
            self._sum = all_reduce(self.owned, self.layout.replicas)

    def wait(self) -> None:
        """Wait for the reduction in flight; on CUDA the current stream waits, not the host."""
        if self._sum is not None:
            self._sum.wait()
            self._sum = None

    def start_gather(self) -> None:
        """Start the in-place all-gather of the updated weight shards over ``layout.group``, or of the payloads of a
        declared storage, after one in flight."""
        # wait first: if nothing waited for the previous all-gather, two collectives would write the same buffer
        self.finish_gather()
        group = self.layout.group
        if not self.gathers:
            return
        sent = self._all_weights() if self.storage is None else self._write_payloads(self.storage).view(-1)
        # in place: the input is a view of the output at this rank's offset; NCCL and gloo then skip the local copy
        self._gather = all_gather(sent, local_shard(sent, group), group=group.handle, async_op=True)

    def _write_payloads(self, kind: type[Storage]) -> Tensor:
        """Return all payloads, uint8 [blocks, bytes]; blocks of other ranks keep old values."""
        kind.prepare(self.parameters, self.shards, self.layout.group)
        for shard in self.shards:
            assert shard.storage is not None, "payloads are gathered after the optimizer has built the storages"
            payload = shard.storage.payload()
            first = (self._places[shard.parameter].start + shard.start) // kind.block
            self.payloads[first : first + len(payload)].copy_(payload)
        return self.payloads

    def finish_gather(self) -> None:
        """Wait for the all-gather in flight (on CUDA: in stream order); with a declared storage write the weights from
        the payloads, or free them if GEMMs read the payloads."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            if self.storage is not None and self.storage.gathers_copies:
                self._has_copies = True
                self._free_weights()
            elif self.storage is not None:
                self.storage.install(self.payloads, self._all_weights())

    def gather_exactly(self) -> None:
        """All-gather the weights themselves if GEMMs read gathered copies and the weights are not up to date. Waits for
        gathers in flight. Collective over ``layout.group`` then."""
        self.finish_gather()
        if not self.is_exact:
            weights = self._all_weights()
            local = local_shard(weights, self.layout.group)
            all_gather(weights, local, group=self.layout.group.handle, async_op=True).wait()
            self.is_exact = True

    def install_copies(self) -> None:
        """Write rounded values to weights outside of this rank's shards that are not up to date; no collective."""
        if not self.is_exact and self.storage is not None:
            local = local_shard(self._all_weights(), self.layout.group)
            exact = local.clone()
            for parameter in self.parameters:
                self.storage.install_copy(parameter)
            local.copy_(exact)


class ParamAndGradBuffer:
    """Flat storage of the gradients, and with sharded optimizer state of the weights, of ``parameters`` of one kind and
    one reduction group. The constructor sets ``main_grad``, ``grad_added_to_main_grad`` and ``grad_ready`` on every
    parameter, and moves ``parameter.data`` into flat weight buffers."""

    def __init__(self, parameters: Sequence[nn.Parameter], kind: BufferKind, layout: BufferLayout) -> None:
        self.layout = layout = replace(layout, storage=kind.storage)
        self.parameters = list(reversed(parameters))
        block = 1 if kind.storage is None else kind.storage.block
        rule = CutRule(layout.group.size if layout.sharded else 1, layout.pad_for_bus, block, kind.owns_matrices)
        cut = cut_buffer(
            [parameter.numel() for parameter in self.parameters], [layout.separate(other) for other in self.parameters],
            layout.bucket_size, rule,
        )  # fmt: skip
        like = self.parameters[0]
        self.starts = dict(zip(self.parameters, cut.starts))
        self.grad_data = torch.zeros(cut.total, dtype=kind.grad_dtype, device=like.device)
        # what is freed between all-gathers cannot be part of one tensor
        is_one = layout.sharded and (kind.storage is None or not kind.storage.gathers_copies)
        weights = torch.zeros(cut.total, dtype=like.dtype, device=like.device) if is_one else None
        self.param_data = weights
        """Flat weights of all buckets; None without sharding, and if each bucket has a separate tensor."""
        self.buckets: list[Bucket] = []
        self.buckets_by_parameter: dict[nn.Parameter, Bucket] = {}
        first = 0
        for last, begin, end in cut.buckets:
            part = None if weights is None else weights[begin:end]
            if layout.sharded and part is None:
                part = torch.zeros(end - begin, dtype=like.dtype, device=like.device)
            starts = {parameter: self.starts[parameter] - begin for parameter in self.parameters[first:last]}
            places = {parameter: slice(start, start + parameter.numel()) for parameter, start in starts.items()}
            self.buckets.append(Bucket(self.grad_data[begin:end], part, places, layout))
            first = last
        for bucket in self.buckets:
            self.buckets_by_parameter.update(dict.fromkeys(bucket.parameters, bucket))
        for parameter, start in self.starts.items():
            self._attach_gradient(parameter, slice(start, start + parameter.numel()))

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters of the buffer, in memory order (Megatron-LM's name)."""
        return self.parameters

    def _attach_gradient(self, parameter: nn.Parameter, place: slice) -> None:
        """``grad_ready`` is an fp32 scalar leaf."""
        parameter.main_grad = self.grad_data[place].view(parameter.shape)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        ready = torch.zeros((), dtype=torch.float32, device=parameter.device, requires_grad=True)
        parameter.grad_ready = ready  # type: ignore[attr-defined]

    def zero(self) -> None:
        """Zero all gradients."""
        self.grad_data.zero_()

    def reset(self) -> None:
        """Mark all gradients as not ready; drops handles of reductions in flight without waiting."""
        for bucket in self.buckets:
            bucket.reset()

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Count the gradient of the last micro-batch as ready, then start the reductions of complete buckets in order,
        up to the first incomplete one (not if ``is_last``). RuntimeError if the bucket is complete or started already,
        i.e. an earlier micro-batch ran outside ``no_sync``."""
        # Start buckets in a fixed order even if gradients become ready in another one: ranks may run backward in
        # different orders (unused branches, experts without tokens), and collectives in different orders deadlock.
        arrived = self.buckets_by_parameter[parameter]
        if arrived.is_last:
            return
        if arrived.started or arrived.pending == 0:
            raise RuntimeError("a gradient followed its reduction: run all micro-batches before the last in no_sync()")
        arrived.pending -= 1
        for bucket in self.buckets:
            if bucket.started or bucket.is_last:
                continue
            if bucket.pending > 0:
                return
            bucket.start_sum()

    def start_sync(self) -> None:
        """Start the remaining reductions, in bucket order: all without overlap; with overlap, buckets with unused
        parameters or ``is_last``. Collective; does not wait."""
        for bucket in self.buckets:
            if not bucket.started:
                bucket.start_sum()

    def finish_sync(self) -> None:
        """Wait for all reductions (on CUDA: in stream order), then all-reduce over optimizer instances."""
        for bucket in self.buckets:  # start all before waiting for the first, so that they overlap
            bucket.sum_replicas()
        for bucket in self.buckets:
            bucket.wait()

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradients by ``factor`` in place; with a sharded layout only this rank's shards."""
        if self.layout.sharded:
            for bucket in self.buckets:
                bucket.owned.mul_(factor)
        else:
            self.grad_data.mul_(factor)


def group_by_kind(parameters: Iterable[nn.Parameter], reduce_in_fp32: bool) -> dict[BufferKind, list[nn.Parameter]]:
    """Group parameters by dtype, gradient dtype (fp32 for 16 bits with ``reduce_in_fp32``), declared storage, and
    whether the update rule owns matrices. Each list keeps the given order."""
    kinds: dict[BufferKind, list[nn.Parameter]] = {}
    for parameter in parameters:
        spec, dtype = spec_or_replicated(parameter), parameter.dtype
        grad_dtype = torch.float32 if dtype in HALF and reduce_in_fp32 else dtype
        kind = BufferKind(dtype, grad_dtype, spec.storage, spec.owns_matrices)
        kinds.setdefault(kind, []).append(parameter)
    return kinds
