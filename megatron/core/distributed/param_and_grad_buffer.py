"""Contiguous gradient buffers, split into buckets; one collective per bucket.

A :class:`ParamAndGradBuffer` holds the gradients of all parameters with the same dtypes and the same reduction group in
one flat tensor, in reverse creation order (the order in which backward produces gradients). ``parameter.main_grad`` is
a view into it. ``parameter.grad_ready`` is a 0-d leaf tensor: operators that accumulate into ``main_grad`` themselves
(``tensor_parallel/linear.py``) return a gradient for this leaf instead of for the parameter, which fires its hook.

With sharded optimizer state (ZeRO-1, Rajbhandari et al. 2020) each rank owns one contiguous range of every bucket.
Gradients are reduced into this range only. The weights live in a second flat tensor with the same layout, so that one
all-gather per bucket distributes the updated weights, or the payloads of their declared storage
(``fusions/storage.py``). Parameters whose update rule owns matrices have separate buffers, whose shards consist of full
parameters.

The bucket layout depends only on the parameters, the bucket size and the number of shards. The order of summation, and
so the result, is therefore the same with and without overlap.
"""

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
    alone: Callable[[nn.Parameter], bool] = lambda parameter: False
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
    """Contiguous range of a buffer that one collective reduces (and one all-gather of weights fills).

    Args:
        grads: flat view of the gradients.
        weights: flat view of the weights with the same layout if the optimizer state is sharded; else None.
        parameters: parameters of this bucket.
        layout: reduction groups and collective, storage.
    """

    def __init__(
        self, grads: Tensor, weights: Tensor | None, parameters: Sequence[nn.Parameter], layout: BufferLayout
    ) -> None:
        self.grads, self.weights, self.layout = grads, weights, layout
        self.parameters = list(parameters)
        self.shards: list[ParameterShard] = []
        """This rank's shards, set by the buffer."""
        self.storage, storage = None, layout.storage
        if storage is not None and storage.payload_bytes is not None and weights is not None and self.gathers:
            self.storage, blocks = storage, weights.numel() // storage.block
            self.payloads = torch.zeros((blocks, storage.payload_bytes), dtype=torch.uint8, device=weights.device)
        self.is_exact = self.storage is None or not self.storage.gathers_copies
        """Whether weights outside of this rank's shards are up to date once gathers have finished."""
        self.pending = len(self.parameters)
        """Number of gradients of the last micro-batch that are not ready."""
        self.is_last = any(getattr(each, "has_several_gradients", False) for each in self.parameters)
        """Whether the reduction starts only after the backward pass. Needed for modules that run several times per
        forward: with recomputation or delayed weight gradients their hooks fire once per run, so that the count of
        ready gradients would be too high."""
        self.started = False
        self._sum: AsyncHandle | None = None
        self._gather: AsyncHandle | None = None

    def reset(self) -> None:
        """Mark all gradients as not ready and the reduction as not started."""
        self.pending = len(self.parameters)
        self._sum, self.started = None, False

    @property
    def owned(self) -> Tensor:
        """View of the gradients that this rank's optimizer reads: its shard, or the full bucket if unsharded."""
        return local_shard(self.grads, self.layout.group) if self.layout.sharded else self.grads

    @property
    def gathers(self) -> bool:
        """Whether updated weights are all-gathered."""
        return self.weights is not None and self.layout.group.size > 1

    def start_sum(self) -> None:
        """Start the reduction of the bucket over ``layout.group`` in place; for one rank only mark it as started. Until
        :meth:`wait` nothing may read or write the bucket; if sharded, only :attr:`owned` is valid afterwards. Asserts
        that it runs at most once per iteration."""
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
        """Start the in-place all-gather of the updated weight shards over ``layout.group``, or with a declared storage
        of their payloads, after waiting for an all-gather in flight. Does not wait; :meth:`finish_gather` does. Only
        waits without a weight buffer or for one rank."""
        # wait first: if nothing waited for the previous all-gather, two collectives would write the same buffer
        self.finish_gather()
        group = self.layout.group
        if self.weights is None or not self.gathers:
            return
        sent = self.weights if self.storage is None else self._own_payloads(self.storage).view(-1)
        # in place: the input is a view of the output at this rank's offset; NCCL and gloo then skip the local copy
        self._gather = all_gather(sent, local_shard(sent, group), group=group.handle, async_op=True)

    def _own_payloads(self, kind: type[Storage]) -> Tensor:
        """Write the payloads of this rank's shards to their blocks of ``payloads`` and return all of it, uint8 [blocks,
        bytes]; blocks of other ranks keep old values. Asserts that the optimizer has built the storages."""
        kind.prepare(self.parameters, self.shards, self.layout.group)
        origin = self.weights.storage_offset() if self.weights is not None else 0
        for shard in self.shards:
            assert shard.storage is not None, "payloads are gathered after the optimizer has built the storages"
            payload = shard.storage.payload()
            first = (int(shard.values.storage_offset()) - int(origin)) // kind.block
            self.payloads[first : first + len(payload)].copy_(payload)
        return self.payloads

    def finish_gather(self) -> None:
        """Wait for the all-gather in flight, if any (on CUDA: in stream order); with a declared storage then write the
        weights from the gathered payloads. Afterwards all weights of the bucket are up to date."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            if self.storage is not None and self.weights is not None:
                self.is_exact = not self.storage.gathers_copies
                if self.is_exact:
                    self.storage.install(self.payloads, self.weights)

    def gather_exactly(self) -> None:
        """All-gather the weights themselves if GEMMs read gathered copies and the weights are not up to date. Waits for
        gathers in flight. Collective over ``layout.group`` then."""
        self.finish_gather()
        if not self.is_exact and self.weights is not None:
            own = local_shard(self.weights, self.layout.group)
            all_gather(self.weights, own, group=self.layout.group.handle, async_op=True).wait()
            self.is_exact = True

    def install_copies(self) -> None:
        """Write rounded values to weights outside of this rank's shards that are not up to date; no collective."""
        if not self.is_exact and self.weights is not None and self.storage is not None:
            own = local_shard(self.weights, self.layout.group)
            exact = own.clone()
            for parameter in self.parameters:
                self.storage.install_copy(parameter)
            own.copy_(exact)


class ParamAndGradBuffer:
    """Flat storage of the gradients, and with sharded optimizer state of the weights, of parameters of one dtype. The
    constructor sets ``main_grad``, ``grad_added_to_main_grad`` and ``grad_ready`` on every parameter. With sharded
    optimizer state it also moves ``parameter.data`` into the flat weight buffer.

    Args:
        parameters: parameters of one kind and one reduction group, in creation order.
        kind: dtypes, storage and cuts.
        layout: bucket sizes, groups and collective.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], kind: BufferKind, layout: BufferLayout) -> None:
        self.layout = layout = replace(layout, storage=kind.storage)
        self.parameters = list(reversed(parameters))
        block = 1 if kind.storage is None else kind.storage.block
        rule = CutRule(layout.group.size if layout.sharded else 1, layout.pad_for_bus, block, kind.owns_matrices)
        cut = cut_buffer(
            [parameter.numel() for parameter in self.parameters], [layout.alone(each) for each in self.parameters],
            layout.bucket_size, rule,
        )  # fmt: skip
        like = self.parameters[0]
        self.starts = dict(zip(self.parameters, cut.starts))
        self.grad_data = torch.zeros(cut.total, dtype=kind.grad_dtype, device=like.device)
        self.param_data = torch.zeros(cut.total, dtype=like.dtype, device=like.device) if layout.sharded else None
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        first = 0
        for last, begin, end in cut.buckets:
            weights = None if self.param_data is None else self.param_data[begin:end]
            self.buckets.append(Bucket(self.grad_data[begin:end], weights, self.parameters[first:last], layout))
            first = last
        for bucket in self.buckets:
            self.bucket_of.update(dict.fromkeys(bucket.parameters, bucket))
        for parameter, start in self.starts.items():
            self._adopt(parameter, slice(start, start + parameter.numel()))
        for bucket in self.buckets if layout.sharded else ():
            bucket.shards = list(self._shards(bucket))
            if bucket.storage is not None:
                self._show_payloads(bucket, bucket.storage)

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters of the buffer, in memory order (Megatron-LM's name)."""
        return self.parameters

    @torch.no_grad()
    def _adopt(self, parameter: nn.Parameter, place: slice) -> None:
        """Make ``parameter.main_grad`` a view of the elements ``place`` of the gradient buffer, and create
        ``grad_ready``, an fp32 scalar leaf, and ``grad_added_to_main_grad``. With a weight buffer, also copy the weight
        into it and make ``parameter.data`` a view of it."""
        parameter.main_grad = self.grad_data[place].view(parameter.shape)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        ready = torch.zeros((), dtype=torch.float32, device=parameter.device, requires_grad=True)
        parameter.grad_ready = ready  # type: ignore[attr-defined]
        if self.param_data is not None:
            view = self.param_data[place].view(parameter.shape)
            view.copy_(parameter)
            # the model computes with the memory that the all-gather writes: no copy of gathered weights
            parameter.data = view

    def _show_payloads(self, bucket: Bucket, kind: type[Storage]) -> None:
        """Pass each parameter of ``bucket`` its blocks of the gathered payload."""
        offset = int(bucket.grads.storage_offset())
        for parameter in bucket.parameters:
            first = (self.starts[parameter] - offset) // kind.block
            kind.adopt(parameter, bucket.payloads[first : first - (-parameter.numel() // kind.block)])

    def _shards(self, bucket: Bucket) -> Iterable[ParameterShard]:
        """Yield this rank's non-empty shard of each parameter of ``bucket``, in memory order; its weights and gradient
        are views of the buffers. Padding belongs to no shard."""
        offset, length = int(bucket.grads.storage_offset()), bucket.owned.numel()
        low = offset + self.layout.group.rank * length
        for parameter in bucket.parameters:
            begin = self.starts[parameter]
            start, stop = max(low - begin, 0), min(low + length - begin, parameter.numel())
            if start < stop:
                yield self._shard(parameter, start, stop)

    def _shard(self, parameter: nn.Parameter, start: int, stop: int) -> ParameterShard:
        """Return the shard of elements ``start`` to ``stop`` of ``parameter``, with views of weight and gradient
        buffers."""
        assert self.param_data is not None
        place = slice(self.starts[parameter] + start, self.starts[parameter] + stop)
        grad = self.grad_data[place]
        return ParameterShard(parameter, start, stop, self.param_data[place], lambda: grad, parameter.dtype)

    def zero(self) -> None:
        """Zero all gradients."""
        self.grad_data.zero_()

    def reset(self) -> None:
        """Mark all gradients as not ready; drops handles of reductions in flight without waiting."""
        for bucket in self.buckets:
            bucket.reset()

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Count the gradient of ``parameter`` in the last micro-batch as ready, then start the reduction of every
        complete bucket, in bucket order up to the first incomplete one. Does nothing if its bucket is reduced after
        backward (``is_last``). Raises RuntimeError if its bucket is already complete or started, i.e. an earlier
        micro-batch ran outside ``no_sync``."""
        # Start buckets in a fixed order even if gradients become ready in another one: ranks may run backward in
        # different orders (unused branches, experts without tokens), and collectives in different orders deadlock.
        arrived = self.bucket_of[parameter]
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
        """Wait for all reductions (on CUDA: in stream order), start the all-reduces over optimizer instances and wait
        for these. Call it after ``start_sync``."""
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
    """Group parameters by the properties that a buffer shares: dtype, gradient dtype, declared storage, and whether the
    update rule owns matrices. Each list keeps the given order. The gradient dtype is fp32 for bf16 and fp16 parameters
    if ``reduce_in_fp32``, else the dtype of the parameter."""
    kinds: dict[BufferKind, list[nn.Parameter]] = {}
    for parameter in parameters:
        spec, dtype = spec_or_replicated(parameter), parameter.dtype
        grad_dtype = torch.float32 if dtype in HALF and reduce_in_fp32 else dtype
        kind = BufferKind(dtype, grad_dtype, spec.storage, spec.owns_matrices)
        kinds.setdefault(kind, []).append(parameter)
    return kinds
