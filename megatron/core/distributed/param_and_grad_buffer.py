"""Contiguous gradient memory. A :class:`ParamAndGradBuffer` holds the gradients of all parameters that the same ranks
sum and that have the same dtypes in one flat tensor, in reverse creation order (the order in which backward produces
them), cut into buckets: the unit of one collective. ``parameter.main_grad`` is a view into it; ``parameter.grad_ready``
is a token, a leaf that stands for the parameter in autograd's graph where operators add to ``main_grad`` by themselves
(``tensor_parallel/linear.py``).

Where ranks share out the optimizer state (ZeRO 1, Rajbhandari et al. 2020), each owns one stretch of every bucket: its
gradients are summed only there, and the weights lie in a second flat tensor of the same layout, so that one all-gather
per bucket brings the updated ones to everybody.

The bucket layout depends on the parameters, the bucket size and the number of shards alone: sums are added up in the
same order whatever overlaps with what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.distributed.reductions import Reduction, all_reduce, shard_of
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.collective_names import all_gather
from megatron.core.groups.process_groups import Group
from megatron.core.sharding.buffer_layout import bucket_alignment, cut_buffer
from megatron.core.sharding.parameter_shard import ParameterShard


@dataclass(frozen=True)
class BufferLayout:
    """The cut of a buffer, and the group that sums it."""

    group: Group
    """Ranks over which gradients are summed; the owners of the shards."""
    reduction: Reduction = all_reduce
    """How a bucket is summed over ``group``."""
    sharded: bool = False
    """Whether each rank of ``group`` updates a stretch of its own."""
    replicas: Group = Group("dp_cp_replica")
    """Ranks that own the same stretches; their sums are added up too."""
    bucket_size: int | None = None
    """Least number of elements of a bucket; None puts everything into one."""
    pad_for_bus: bool = False
    """Make buckets' sizes multiples of 2^16."""
    alone: Callable[[nn.Parameter], bool] = lambda parameter: False
    """Parameters that get a bucket each, so that ranks whose other parameters differ cut them alike."""

    @property
    def bucket_alignment(self) -> int:
        """Every bucket's size is a multiple of it."""
        return bucket_alignment(self.group.size if self.sharded else 1, self.pad_for_bus)


class Bucket:
    """One stretch of a buffer, summed (and its weights gathered) at once.

    Args:
        grads: the flat view of the gradients.
        weights: the same of the weights, where ranks share out the update; else None.
        parameters: those that lie in it.
        layout: who sums it, and how.
    """

    def __init__(
        self, grads: Tensor, weights: Tensor | None, parameters: Sequence[nn.Parameter], layout: BufferLayout
    ) -> None:
        self.grads, self.weights, self.layout = grads, weights, layout
        self.parameters = list(parameters)
        self.pending = len(self.parameters)
        """Gradients of the last micro-batch that are not ready."""
        self.is_last = any(getattr(each, "has_several_gradients", False) for each in self.parameters)
        """Whether it waits for the end of the backward pass: of a module that runs several times, recomputation and
        delayed weight gradients announce a gradient each time."""
        self.started = False
        self._sum: AsyncHandle | None = None
        self._gather: AsyncHandle | None = None

    def reset(self) -> None:
        """Expect every gradient again."""
        self.pending = len(self.parameters)
        self._sum, self.started = None, False

    @property
    def owned(self) -> Tensor:
        """The gradients that this rank has a use for: its shard, or all."""
        return shard_of(self.grads, self.layout.group) if self.layout.sharded else self.grads

    def start_sum(self) -> None:
        """Start the sum (nothing to do on one rank)."""
        assert not self.started, "a bucket was reduced twice in one iteration"
        self.started = True
        if self.layout.group.size > 1:
            self._sum = self.layout.reduction(self.grads, self.layout.group)

    def sum_replicas(self) -> None:
        """Wait for the sum within the instance and start that over the instances."""
        self.wait()
        if self.layout.replicas.size > 1:
            self._sum = all_reduce(self.owned, self.layout.replicas)

    def wait(self) -> None:
        """Until the sum is there; on CUDA the current stream waits, not the host."""
        if self._sum is not None:
            self._sum.wait()
            self._sum = None

    def start_gather(self) -> None:
        """Start to bring every rank's updated shard of the weights to all ranks."""
        # the buffer of a gather that nobody waited for would be written by two collectives at a time
        self.finish_gather()
        group = self.layout.group
        if self.weights is not None and group.size > 1:
            # in place: the shard is a view of the output at this rank's offset, which NCCL and gloo leave where it is
            self._gather = all_gather(self.weights, shard_of(self.weights, group), group=group.handle, async_op=True)

    def finish_gather(self) -> None:
        """The weights are whole when this returns (on CUDA: in stream order)."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None


class ParamAndGradBuffer:
    """Storage of the gradients, and where updates are shared out of the weights, of parameters of one dtype.

    Args:
        parameters: in creation order.
        grad_dtype: of the accumulation and of the reduction.
        layout: buckets and sums.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], grad_dtype: torch.dtype, layout: BufferLayout) -> None:
        self.layout = layout
        self.parameters = list(reversed(parameters))
        cut = cut_buffer(
            [parameter.numel() for parameter in self.parameters], [layout.alone(each) for each in self.parameters],
            layout.bucket_size, layout.bucket_alignment,
        )  # fmt: skip
        like = self.parameters[0]
        self.starts = dict(zip(self.parameters, cut.starts))
        self.grad_data = torch.zeros(cut.total, dtype=grad_dtype, device=like.device)
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

    @torch.no_grad()
    def _adopt(self, parameter: nn.Parameter, place: slice) -> None:
        parameter.main_grad = self.grad_data[place].view(parameter.shape)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        ready = torch.zeros((), dtype=torch.float32, device=parameter.device, requires_grad=True)
        parameter.grad_ready = ready  # type: ignore[attr-defined]
        if self.param_data is not None:
            view = self.param_data[place].view(parameter.shape)
            view.copy_(parameter)
            # the model then computes with the memory that the gather writes: no copy of gathered weights
            parameter.data = view

    def shards(self) -> Iterable[ParameterShard]:
        """What this rank updates, in the order of memory."""
        assert self.param_data is not None
        for bucket in self.buckets:
            offset, length = int(bucket.grads.storage_offset()), bucket.owned.numel()
            low = offset + self.layout.group.rank * length
            for parameter in bucket.parameters:
                begin = self.starts[parameter]
                start, stop = max(low - begin, 0), min(low + length - begin, parameter.numel())
                if start < stop:
                    yield self._shard(parameter, start, stop)

    def _shard(self, parameter: nn.Parameter, start: int, stop: int) -> ParameterShard:
        assert self.param_data is not None
        place = slice(self.starts[parameter] + start, self.starts[parameter] + stop)
        grad = self.grad_data[place]
        return ParameterShard(parameter, start, stop, self.param_data[place], lambda: grad, parameter.dtype)

    def reset(self) -> None:
        """Zero gradients, none of them ready."""
        self.grad_data.zero_()
        for bucket in self.buckets:
            bucket.reset()

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Note a gradient of the last micro-batch, and start every bucket whose turn has come."""
        # Buckets start in their own order even when gradients come in another: ranks may run backward in different
        # orders (unused branches, experts without tokens), and collectives that start in different orders hang.
        arrived = self.bucket_of[parameter]
        if arrived.is_last:
            return
        if arrived.started or arrived.pending == 0:
            raise RuntimeError("a gradient came after its sum began: run all but the last micro-batch in no_sync()")
        arrived.pending -= 1
        for bucket in self.buckets:
            if bucket.started or bucket.is_last:
                continue
            if bucket.pending > 0:
                return
            bucket.start_sum()

    def start_sync(self) -> None:
        """Start the sums that have not started (all of them without overlap; those of unused parameters with it)."""
        for bucket in self.buckets:
            if not bucket.started:
                bucket.start_sum()

    def finish_sync(self) -> None:
        """Wait for every sum."""
        for bucket in self.buckets:  # all started before the first is waited for: they overlap
            bucket.sum_replicas()
        for bucket in self.buckets:
            bucket.wait()

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradients that this rank has a use for."""
        if self.layout.sharded:
            for bucket in self.buckets:
                bucket.owned.mul_(factor)
        else:
            self.grad_data.mul_(factor)


def gradient_dtype(parameter: nn.Parameter, reduce_in_fp32: bool) -> torch.dtype:
    """fp32 for half precision if ``reduce_in_fp32``, else the parameter's own dtype (fp64 stays fp64)."""
    half = parameter.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and reduce_in_fp32 else parameter.dtype


def group_by_dtype(
    parameters: Iterable[nn.Parameter], reduce_in_fp32: bool
) -> dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]]:
    """Parameters by (their dtype, their gradient's dtype), each list in creation order."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, gradient_dtype(parameter, reduce_in_fp32)), []).append(parameter)
    return kinds
