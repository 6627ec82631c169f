"""Data parallelism around a module: gradients accumulate over micro-batches in contiguous buffers
(:mod:`param_and_grad_buffer`) and are *summed*, never averaged, over the data- and context-parallel ranks. The division
by the number of valid tokens of the global batch comes after, in ``finalize_model_grads``: one rule for any layout.

With ``use_distributed_optimizer`` ranks share out the update: gradients are reduce-scattered, each rank updates its
shard of every bucket, and the updated weights are all-gathered, at once or behind the next forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.distributed import reductions
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import BufferLayout, ParamAndGradBuffer, group_by_dtype
from megatron.core.groups.process_groups import DataParallelGroups, ProcessGroups
from megatron.core.sharding.buffer_layout import chosen_bucket_size
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import data_parallel_groups, spec_or_replicated


class DistributedDataParallel(DataParallel):
    """``module`` with ``parameter.main_grad`` accumulated by hooks and summed over the data-parallel ranks.

    Args:
        config: the model's configuration; not read, kept for callers that pass it first.
        ddp_config: bucket size, overlap, sharding, reduction dtype.
        module: one model chunk.
        disable_bucketing: one bucket per buffer, whatever ``ddp_config`` says.
        groups: this rank's process groups; None takes those of ``parallel_state``, or one rank where it has none.
    """

    def __init__(
        self, config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module,
        disable_bucketing: bool = False, groups: ProcessGroups | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, groups or parallel_state.get_process_groups())
        self.config = config
        self.ddp_config = ddp_config
        self.shares_update = ddp_config.use_distributed_optimizer
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        by_ranks: dict[DataParallelGroups, list[nn.Parameter]] = {}
        for parameter in trained:
            by_ranks.setdefault(data_parallel_groups(spec_or_replicated(parameter), self.groups), []).append(parameter)
        self.grad_buffers = [
            ParamAndGradBuffer(alike, dtype, self._layout(ranks, own, disable_bucketing))
            for ranks, own in by_ranks.items()
            for (_, dtype), alike in group_by_dtype(own, ddp_config.grad_reduce_in_fp32).items()
        ]
        self._buffer_of = {parameter: buffer for buffer in self.grad_buffers for parameter in buffer.parameters}
        self._last_microbatch = True
        # both kinds: a parameter may be used by a fused product here and by plain autograd there
        # hooks that held the model would keep it for ever: Python's garbage collector cannot see through autograd
        accumulate = partial(_call, weakref.WeakMethod(self._accumulate))
        self._hooks = [parameter.register_post_accumulate_grad_hook(accumulate) for parameter in trained]
        self._hooks += [self._on_token(parameter) for parameter in trained]
        if ddp_config.use_distributed_optimizer:
            # a checkpoint of weights that are still being gathered would hold this rank's shard and stale rest
            self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.finish_param_sync()))
            self._hooks += self._gather_hooks() if ddp_config.overlap_param_gather else []

    def _layout(
        self, ranks: DataParallelGroups, parameters: list[nn.Parameter], disable_bucketing: bool
    ) -> BufferLayout:  # fmt: skip
        config = self.ddp_config
        bucket_size = None if disable_bucketing else chosen_bucket_size(
            sum(parameter.numel() for parameter in parameters), bucket_size=config.bucket_size,
            num_buckets=config.num_buckets, overlap=config.overlap_grad_reduce, num_ranks=ranks.reduce.size,
        )  # fmt: skip
        pad = config.pad_buckets_for_high_nccl_busbw
        if not config.use_distributed_optimizer:
            return BufferLayout(ranks.reduce, bucket_size=bucket_size, pad_for_bus=pad)
        accumulating = config.reduce_scatter_with_fp32_accumulation and not config.grad_reduce_in_fp32
        reduce = reductions.reduce_scatter_accumulating_in_fp32 if accumulating else reductions.reduce_scatter_in_place
        return BufferLayout(
            ranks.shard, reduce, sharded=True, replicas=ranks.replica, bucket_size=bucket_size, pad_for_bus=pad,
            alone=_may_be_tied(self.module, self.groups),
        )  # fmt: skip

    def _gather_hooks(self) -> Iterator[Any]:
        """Before a module that owns parameters (or borrows them) runs, their buckets have been gathered, in
        whatever order it runs."""
        for submodule in self.module.modules():
            read = *submodule.parameters(recurse=False), *getattr(submodule, "borrowed", ())
            owned = [p for p in read if p in self._buffer_of]
            buckets = list({id(bucket): bucket for p in owned if (bucket := self._buffer_of[p].bucket_of[p])}.values())
            if buckets:
                yield submodule.register_forward_pre_hook(
                    lambda *_, buckets=buckets: [bucket.finish_gather() for bucket in buckets] and None
                )

    def _accumulate(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        # a fused GEMM has added its gradient already, and autograd's own, if there is one, is a dummy
        if not parameter.grad_added_to_main_grad and parameter.grad is not None:  # type: ignore[attr-defined]
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None  # else autograd would add the next micro-batch's to it, and it would count twice
        self._note(parameter)

    def _on_token(self, parameter: nn.Parameter) -> Any:
        """An operator that adds to ``main_grad`` itself says so by a gradient of the parameter's token."""
        note, owner = weakref.WeakMethod(self._note), weakref.ref(parameter)

        def drop_and_note(token: Tensor) -> None:
            token.grad = None
            _call(note, owner())

        return parameter.grad_ready.register_post_accumulate_grad_hook(drop_and_note)  # type: ignore[attr-defined]

    def _note(self, parameter: nn.Parameter) -> None:
        if self.ddp_config.overlap_grad_reduce and self._last_microbatch:
            self._buffer_of[parameter].gradient_is_ready(parameter)

    def parameter_shards(self) -> dict[nn.Parameter, ParameterShard] | None:
        """What this rank updates: parts of some parameters with a distributed optimizer, else everything (None)."""
        if not self.ddp_config.use_distributed_optimizer:
            return None
        return {shard.parameter: shard for buffer in self.grad_buffers for shard in buffer.shards()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here are of micro-batches before the last: nothing is reduced yet."""
        self._last_microbatch = False
        try:
            yield
        finally:
            self._last_microbatch = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Start every sum that has not started."""
        for buffer in self.grad_buffers:
            buffer.start_sync()

    def finish_grad_sync(self, *unused: Any) -> None:
        """``main_grad`` holds the sum over all ranks when this returns (on CUDA: in stream order): all of it, or with a
        distributed optimizer what lies in this rank's shards."""
        self.start_grad_sync()
        for buffer in self.grad_buffers:
            buffer.finish_sync()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply every gradient that this rank uses; a zero-dimensional tensor avoids a wait for the device."""
        for buffer in self.grad_buffers:
            buffer.scale(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Ready for the first micro-batch of an iteration."""
        for buffer in self.grad_buffers:  # first, so that a GPU has work meanwhile
            buffer.reset()
        for parameter in self._buffer_of:
            parameter.grad = None
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def start_param_sync(self) -> None:
        """All-gathers every bucket's updated weights, in the order in which the forward pass needs them."""
        buckets = [bucket for buffer in self.grad_buffers for bucket in reversed(buffer.buckets)]
        for bucket in buckets:
            bucket.start_gather()
        if not self.ddp_config.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Waits for every gather."""
        for buffer in self.grad_buffers:
            for bucket in buffer.buckets:
                bucket.finish_gather()


def _call(method: weakref.WeakMethod[Any], parameter: Tensor | None) -> None:
    """Calls the method while the model lives."""
    if (alive := method()) is not None:
        alive(parameter)


def _may_be_tied(module: nn.Module, groups: ProcessGroups) -> Any:
    """Which parameters the first and the last pipeline stage may both hold: their shards must be cut alike."""
    if groups.embedding.size == 1:
        return lambda parameter: False
    tied = {p for name, p in module.named_parameters() if name.endswith("word_embeddings.weight")}
    tied |= {p for p in module.parameters() if "embedding" in spec_or_replicated(p).grad}
    return tied.__contains__
