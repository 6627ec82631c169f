"""Data-parallel wrapper with contiguous gradient buffers (:mod:`param_and_grad_buffer`).

Gradients are accumulated over micro-batches and *summed*, never averaged, over the data- and context-parallel ranks.
``finalize_model_grads`` then divides by the valid tokens of the global batch, so that all layouts use the same rule.

With ``use_distributed_optimizer`` (ZeRO-1) gradients are reduce-scattered, each rank updates its shard of every bucket,
and the updated weights are all-gathered, now or overlapped with the next forward."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.distributed import reductions
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import Bucket, BufferLayout, ParamAndGradBuffer, group_by_kind
from megatron.core.distributed.weight_updates import WeightUpdates
from megatron.core.groups.process_groups import DataParallelGroups, ProcessGroups
from megatron.core.sharding.buffer_layout import chosen_bucket_size
from megatron.core.sharding.named_slices import stored_parameters
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import data_parallel_groups, spec_or_replicated


class DistributedDataParallel(DataParallel):
    """Wrapper that accumulates ``parameter.main_grad`` in autograd hooks and sums it over the data-parallel ranks;
    ``parameter.grad`` is freed after each accumulation. With a distributed optimizer ``parameter.data`` moves into the
    flat weight buffers. Starts no collective: equal weights need the same seed or :meth:`broadcast_params`. ``config``
    is unused (Megatron-LM's signature); ``disable_bucketing``: a single bucket per buffer; ``groups`` None uses
    ``parallel_state``, or a single rank if it is not initialized."""

    def __init__(
        self, config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module,
        disable_bucketing: bool = False, groups: ProcessGroups | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, groups or parallel_state.get_process_groups())
        self.config = getattr(module, "config", None) if config is None else config
        self.ddp_config = ddp_config
        self.shards_optimizer = ddp_config.use_distributed_optimizer
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        by_ranks: dict[DataParallelGroups, list[nn.Parameter]] = {}
        for parameter in trained:
            by_ranks.setdefault(data_parallel_groups(spec_or_replicated(parameter), self.groups), []).append(parameter)
        self.grad_buffers = [
            ParamAndGradBuffer(similar, kind, self._layout(ranks, parameters, disable_bucketing))
            for ranks, parameters in by_ranks.items()
            for kind, similar in group_by_kind(parameters, ddp_config.grad_reduce_in_fp32).items()
        ]
        self._buffers_by_parameter = {
            parameter: buffer for buffer in self.grad_buffers for parameter in buffer.parameters
        }
        self._last_microbatch = True
        # hooks on both the parameter and its token: one parameter may be used by a fused GEMM and by plain autograd
        # weak references: hooks that hold the model would leak it, since the garbage collector cannot traverse autograd
        accumulate = partial(_call, weakref.WeakMethod(self._accumulate))
        self._hooks = [parameter.register_post_accumulate_grad_hook(accumulate) for parameter in trained]
        self._hooks += [self._on_token(parameter) for parameter in trained]
        if ddp_config.use_distributed_optimizer:
            # wait before state_dict: otherwise a checkpoint would contain stale weights outside this rank's shard
            self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.finish_param_sync()))
            self._hooks += self._gather_hooks() if ddp_config.overlap_param_gather else []

    def _layout(
        self, ranks: DataParallelGroups, parameters: list[nn.Parameter], disable_bucketing: bool
    ) -> BufferLayout:
        """Shards are reduce-scattered in place (with fp32 accumulation if set and ``grad_reduce_in_fp32`` is not)."""
        config = self.ddp_config
        bucket_size = None if disable_bucketing else chosen_bucket_size(
            sum(parameter.numel() for parameter in parameters), bucket_size=config.bucket_size,
            num_buckets=config.num_buckets, overlap=config.overlap_grad_reduce, num_ranks=ranks.reduce.size,
        )  # fmt: skip
        pad = config.pad_buckets_for_high_nccl_busbw
        if not config.use_distributed_optimizer:
            return BufferLayout(ranks.reduce, bucket_size=bucket_size, pad_for_bus=pad)
        accumulating = config.reduce_scatter_with_fp32_accumulation and not config.grad_reduce_in_fp32
        reduce = reductions.ReduceScatterInFp32 if accumulating else reductions.reduce_scatter_in_place
        return BufferLayout(
            ranks.shard, reduce, sharded=True, replicas=ranks.replica, bucket_size=bucket_size, pad_for_bus=pad,
            separate=_may_be_tied(self.module, self.groups),
        )  # fmt: skip

    def _readers(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield each module with the trained parameters that it reads, directly or as ``borrowed``."""
        for submodule in self.module.modules():
            read = *submodule.parameters(recurse=False), *getattr(submodule, "borrowed", ())
            owned = [p for p in read if p in self._buffers_by_parameter]
            if owned:
                yield submodule, owned

    def _gather_hooks(self) -> Iterator[Any]:
        """Register forward pre-hooks that wait for the weight all-gathers of a module's buckets; yield the handles."""
        for submodule, owned in self._readers():
            buckets_read = (self._buffers_by_parameter[weight].buckets_by_parameter[weight] for weight in owned)
            buckets = list({id(bucket): bucket for bucket in buckets_read}.values())
            # a pre-hook must return None: torch would take any other result as the module's new input
            yield submodule.register_forward_pre_hook(
                lambda *_, buckets=buckets: [bucket.finish_gather() for bucket in buckets] and None
            )

    @property
    def overlaps_updates(self) -> bool:
        """Whether forward passes can wait for each update: not if all weights are gathered at once."""
        return self.ddp_config.overlap_param_gather or not any(bucket.gathers for bucket in self._buckets())

    def expect_updates(self, updates: WeightUpdates) -> None:
        """Let modules wait for the updates of the parameters that they read, and everything else for all updates."""
        super().expect_updates(updates)
        for submodule, owned in self._readers():
            # before the hook that waits for a gather, which starts after the updates
            hook = lambda *_, owned=owned: updates.wait_for(owned)  # noqa: E731
            self._hooks.append(submodule.register_forward_pre_hook(hook, prepend=True))
        self._hooks.append(self.module.register_state_dict_pre_hook(lambda *_: updates.join()))

    def _buckets(self) -> list[Bucket]:
        """In the order of the forward pass within a buffer."""
        return [bucket for buffer in self.grad_buffers for bucket in reversed(buffer.buckets)]

    def _accumulate(self, parameter: Tensor) -> None:
        """Hook, once per parameter and backward pass: add the gradient to ``main_grad``, unless
        ``grad_added_to_main_grad`` is set, and free it. May start the reduction of a bucket."""
        assert isinstance(parameter, nn.Parameter)
        # a fused wgrad GEMM has accumulated already; a gradient from autograd, if any, is a dummy
        if not parameter.grad_added_to_main_grad and parameter.grad is not None:  # type: ignore[attr-defined]
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None  # otherwise autograd accumulates into it and this micro-batch would be added twice
        self._note(parameter)

    def _on_token(self, parameter: nn.Parameter) -> Any:
        """Register a hook on ``parameter.grad_ready``, which operators that add to ``main_grad`` themselves trigger.
        Holds only weak references to model and parameter."""
        note, owner = weakref.WeakMethod(self._note), weakref.ref(parameter)

        def drop_and_note(token: Tensor) -> None:
            token.grad = None
            _call(note, owner())

        return parameter.grad_ready.register_post_accumulate_grad_hook(drop_and_note)  # type: ignore[attr-defined]

    def _note(self, parameter: nn.Parameter) -> None:
        if self.ddp_config.overlap_grad_reduce and self._last_microbatch:
            self._buffers_by_parameter[parameter].gradient_is_ready(parameter)

    def parameter_shards(self) -> dict[nn.Parameter, ParameterShard] | None:
        if not self.ddp_config.use_distributed_optimizer:
            return None
        return {shard.parameter: shard for bucket in self._buckets() for shard in bucket.shards}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable overlapped gradient reduction in backward, for all micro-batches but the last. May be nested."""
        before, self._last_microbatch = self._last_microbatch, False
        try:
            yield
        finally:
            self._last_microbatch = before

    def start_grad_sync(self, *unused: Any) -> None:
        for buffer in self.grad_buffers:
            buffer.start_sync()

    def finish_grad_sync(self, *unused: Any) -> None:
        """As in the base class; with a distributed optimizer ``main_grad`` holds the sum only in this rank's shards."""
        self.start_grad_sync()
        for buffer in self.grad_buffers:
            buffer.finish_sync()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        for buffer in self.grad_buffers:
            buffer.scale(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Zero the gradient buffers, mark all gradients as not ready, and free ``grad`` of every parameter."""
        for buffer in self.grad_buffers:  # first: the GPU zeroes buffers while the host loops over parameters
            # after the updates that read the gradients
            buffer.zero() if self.updates is None else self.updates.run(buffer.zero)
            buffer.reset()
        for parameter in self._buffers_by_parameter:
            parameter.grad = None
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def start_param_sync(self, *unused: Any, **ignored: Any) -> None:
        """Start the all-gathers of updated weights in the order of the forward pass, and wait for them unless
        ``overlap_param_gather`` is set. Collective; no effect without a distributed optimizer."""
        for _ in self.gathers_of_updated(()):
            raise AssertionError("no update is awaited")
        if not self.ddp_config.overlap_param_gather:
            self._finish_gathers()

    def gathers_of_updated(self, unfinished: Collection[nn.Parameter]) -> Iterator[None]:
        """Start the all-gathers like :meth:`start_param_sync`, each after the updates that are queued by then. Yields
        while the shards of the next bucket are in ``unfinished``, which the caller empties."""
        for bucket in self._buckets():
            while any(shard.parameter in unfinished for shard in bucket.shards):
                yield
            if self.updates is None:
                bucket.start_gather()
            elif bucket.gathers:
                self.updates.run(bucket.start_gather, [self.updates.record_current()], bucket.parameters)

    @property
    def buffers(self) -> BufferList:  # type: ignore[override]
        """Gradient buffers of dense parameters, with ``grad_data`` and ``param_data`` as in Megatron-LM (None for
        weights that are gathered in fp8). Calling the result, ``ddp.buffers()``, yields the module's buffers."""
        return BufferList(self, [buffer for buffer in self.grad_buffers if not self._is_of_experts(buffer)])

    @property
    def expert_parallel_buffers(self) -> list[ParamAndGradBuffer]:
        """Gradient buffers of expert parameters; empty if expert- and dense-data-parallel ranks are equal."""
        return [buffer for buffer in self.grad_buffers if self._is_of_experts(buffer)]

    def _is_of_experts(self, buffer: ParamAndGradBuffer) -> bool:
        of_experts = spec_or_replicated(buffer.parameters[0]).is_expert
        return of_experts and self.groups.expert != self.groups.dense

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Broadcast all parameters in place from the first rank over which their gradient is summed. Collective, one
        broadcast each. Masters of an existing optimizer keep the old values until ``reload_model_params``."""
        self.gather_exact_weights()
        for parameter in self.module.parameters():
            group = data_parallel_groups(spec_or_replicated(parameter), self.groups).reduce
            if group.size > 1:
                dist.broadcast(parameter.data, src=group.ranks[0], group=group.handle)

    def enable_forward_pre_hook(self) -> None:
        """Do nothing: the pre-hooks of ``overlap_param_gather`` are always enabled. Exists for Megatron-LM programs."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Wait for all weight all-gathers. The pre-hooks stay enabled; ``param_sync`` is ignored."""
        self.finish_param_sync()

    def finish_gathers(self) -> None:
        """Wait for all updates of weights and all weight all-gathers in flight (on CUDA: in stream order)."""
        self.finish_updates()
        self._finish_gathers()

    @torch.no_grad()
    def finish_param_sync(self) -> None:
        """Call :meth:`finish_gathers`, then write the values that GEMMs read to weights that were not gathered."""
        self.finish_gathers()
        for bucket in self._buckets():
            bucket.install_copies()

    def _finish_gathers(self) -> None:
        for bucket in self._buckets():
            bucket.finish_gather()

    def gather_exact_weights(self) -> None:
        self.finish_updates()
        for bucket in self._buckets():
            bucket.gather_exactly()


class BufferList(list[ParamAndGradBuffer]):
    """List of gradient buffers that can also be called like ``torch.nn.Module.buffers``."""

    def __init__(self, owner: nn.Module, buffers: list[ParamAndGradBuffer]) -> None:
        super().__init__(buffers)
        self._owner = owner

    def __call__(self, recurse: bool = True) -> Iterator[Tensor]:
        return nn.Module.buffers(self._owner, recurse)


def _call(method: weakref.WeakMethod[Any], parameter: Tensor | None) -> None:
    if (alive := method()) is not None:
        alive(parameter)


def _may_be_tied(module: nn.Module, groups: ProcessGroups) -> Any:
    """Return a predicate for parameters that the first and last pipeline stage may share (tied embeddings). These get a
    separate bucket, because both stages must shard them at the same elements."""
    if groups.embedding.size == 1:
        return lambda parameter: False
    tied = {p for name, p in stored_parameters(module) if name.endswith("word_embeddings.weight")}
    tied |= {p for p in module.parameters() if "embedding" in spec_or_replicated(p).grad}
    return tied.__contains__
