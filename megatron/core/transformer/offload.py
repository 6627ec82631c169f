"""Activation offloading: tensors that selected modules save for backward move to host memory until backward.

A *group* is one call of a selected module. Its tensors are copied to the host on a side stream while the next modules
compute; a few groups later their device memory is free. Backward runs through the groups in reverse order: when it
reaches one, the groups before it start to return. The last groups of a forward pass that is followed by its backward
pass are still on the device, and are not copied back.

Full storages are copied, and views are rebuilt with their strides. A storage that is saved several times (as output of
attention and as input of its projection, or as queries, keys and values of one tensor) is copied once. Results are
equal to the bit. As for autograd, a saved tensor must not change in place before backward; here nothing checks that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.config.errors import UserError
from megatron.core.config.memory import IN_FLIGHT, LOADED_AHEAD, RecomputeConfig
from megatron.core.host_memory import SideStream
from megatron.core.transformer.sites import Run, Sited, known_sites

_MAX_STORAGE = 4  # sizes of a tensor: queries may be a third of the storage that all heads share


class Offloaded:
    """Storage that was saved for backward: on the device, on the host, or both."""

    def __init__(self, streams: Streams, source: Tensor, group: int) -> None:
        """Start the copy of ``source`` (uint8, a full storage) to the host."""
        self.streams, self.group, self.device = streams, group, source.device
        self.on_device: Tensor | None = source
        self.host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.is_cuda)
        self.stored = streams.store.copy([(self.host, source)], [streams.store.record_current()])
        self.loaded: torch.cuda.Event | None = None
        """Completion of a load that no stream has waited for."""

    def release(self) -> None:
        """Free the device memory after the copy to the host, in stream order."""
        self.streams.store.wait(self.stored)
        self.on_device = None

    def load(self) -> None:
        """Start the copy to the device unless it has the data."""
        if self.on_device is None:
            self.on_device = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
            # the new memory may still be in use by earlier work of the current stream
            after = [self.stored, self.streams.load.record_current()]
            self.loaded = self.streams.load.copy([(self.on_device, self.host)], after)

    def get(self) -> Tensor:
        """Return the storage on the device, uint8, for use by the current stream."""
        self.load()
        self._wait()
        assert self.on_device is not None
        return self.on_device

    def _wait(self) -> None:
        if self.loaded is not None:
            self.streams.load.wait(self.loaded)
            self.loaded = None

    def __del__(self) -> None:
        self._wait()  # unused: the allocator may pass the memory on while it is being filled


class Streams(NamedTuple):
    """Side streams of both directions."""

    store: SideStream
    load: SideStream


class View(NamedTuple):
    """Saved tensor in an offloaded storage."""

    of: Offloaded
    record: ForwardRecord
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        """Return the tensor on the device, and start to load the groups that backward reaches next."""
        self.record.load_before(self.of.group)
        storage = self.of.get().untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=self.of.device).set_(
            storage, self.offset, self.shape, self.strides
        )


class ForwardRecord:
    """Groups of one forward pass in execution order."""

    def __init__(self, offload: ActivationOffload) -> None:
        self._offload = offload
        self.groups: list[list[ref[Offloaded]]] = []
        """The graph owns offloaded storages: they are freed with it."""
        self._reached = -1

    @contextmanager
    def group(self, module: nn.Module) -> Iterator[None]:
        """Context in which saved tensors become a new group; without effect after the configured share of groups."""
        index = len(self.groups)
        self.groups.append([])
        if index >= self._offload.limit:
            yield
            return
        weights = {each.untyped_storage().data_ptr() for each in module.parameters()}

        def pack(x: Tensor) -> Tensor | View:
            if type(x) is not Tensor or x.untyped_storage().data_ptr() in weights:
                return x
            kept = self._offload.find(x)
            if kept is None:
                if (kept := self._offload.store(x, index)) is None:
                    return x
                self.groups[index].append(ref(kept))
            return View(kept, self, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))

        with saved_tensors_hooks(pack, lambda kept: kept.restore() if isinstance(kept, View) else kept):
            yield
        self._offload.end_group()

    def load_after(self, output: Tensor) -> None:
        """Start to load as soon as backward reaches ``output``, the result of the forward pass."""
        if output.requires_grad:
            output.register_hook(lambda gradient: self.load_before(len(self.groups)))

    def load_before(self, group: int) -> None:
        """Start to load the groups before ``group``, at the first call for it."""
        if group == self._reached:
            return
        self._reached = group
        for index in range(group - 1, max(group - 1 - LOADED_AHEAD, -1), -1):
            for reference in self.groups[index]:
                if (offloaded := reference()) is not None:
                    offloaded.load()


class _Stored(NamedTuple):
    """Storage whose device memory waits for its copy."""

    kept: ref[Offloaded]
    address: int
    version: int


class ActivationOffload:
    """Offloading of one stack of layers."""

    def __init__(self, config: RecomputeConfig) -> None:
        self._fraction, self._min_size = config.activation_offload_fraction, config.min_offloaded_tensor_size
        self.limit: float = math.inf
        """Number of groups of a forward pass that are offloaded; known after the first one."""
        self._streams: Streams | None = None
        self._in_flight: deque[list[_Stored]] = deque([[]])

    @contextmanager
    def forward(self) -> Iterator[ForwardRecord]:
        """Context of one forward pass of the stack."""
        record = ForwardRecord(self)
        before = _record.set(record)
        try:
            yield record
        finally:
            _record.reset(before)
        self.limit = math.ceil(self._fraction * len(record.groups))

    def find(self, x: Tensor) -> Offloaded | None:
        """Return the storage of ``x`` if it was stored, unchanged, while it is still alive."""
        address, version = x.untyped_storage().data_ptr(), x._version
        for group in self._in_flight:
            for item in group:
                if (item.address, item.version) == (address, version) and (offloaded := item.kept()) is not None:
                    return offloaded
        return None

    def store(self, x: Tensor, group: int) -> Offloaded | None:
        """Start to offload the storage of ``x``; None if it is small, or mostly other data."""
        storage = x.untyped_storage()
        if x.numel() < self._min_size or storage.nbytes() > _MAX_STORAGE * x.numel() * x.element_size():
            return None
        if self._streams is None:
            self._streams = Streams(SideStream(x.device), SideStream(x.device))
        data = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,))
        kept = Offloaded(self._streams, data, group)
        self._in_flight[-1].append(_Stored(ref(kept), storage.data_ptr(), x._version))
        return kept

    def end_group(self) -> None:
        """Start a new group, and free the device memory of the oldest one in flight."""
        self._in_flight.append([])
        if len(self._in_flight) > IN_FLIGHT:
            for each in self._in_flight.popleft():
                if (kept := each.kept()) is not None:
                    kept.release()


_record: ContextVar[ForwardRecord | None] = ContextVar("forward record", default=None)


class Offload:
    """Policy: what sites in ``offload_modules`` save for backward is moved to the host. Sites outside of a stack's
    forward pass are not affected. Raises UserError for names that no class in use declares."""

    def __init__(self, config: RecomputeConfig) -> None:
        self.names = set(config.offload_modules or ()) if config.fine_grained_activation_offloading else set()
        self.config, declared = config, known_sites("calls", "spans")
        if unknown := sorted(self.names.difference(declared)):
            raise UserError(f"offload_modules {unknown}: choose from {', '.join(declared)}")

    def attach(self, owner: Sited) -> None:
        """Wrap the chosen sites of ``owner``; the forward pass of a stack starts a new record."""
        for name in self.names.intersection((*owner.calls, *owner.spans)):
            module = owner if isinstance(owner, nn.Module) else owner.layer  # type: ignore[attr-defined]
            setattr(owner.at, name, partial(_offloaded, module, getattr(owner.at, name)))
        if self.names and hasattr(owner, "layer_runs"):
            forward = owner.forward  # type: ignore[attr-defined]
            setattr(owner, "forward", partial(run_offloaded, ActivationOffload(self.config), forward))  # noqa: B010


def _offloaded(module: nn.Module, run: Run, function: Callable, *args: object) -> object:
    """Return ``run(function, *args)``; what it saves is offloaded, except the parameters of ``module``."""
    record = _record.get()
    if record is None or not torch.is_grad_enabled():
        return run(function, *args)
    with record.group(module):
        return run(function, *args)


def run_offloaded(offload: ActivationOffload, function: Callable, *args: Any, **more: Any) -> Any:
    """Return ``function(*args, **more)``, the output of a stack of layers, as one forward pass of ``offload``."""
    if not torch.is_grad_enabled():
        return function(*args, **more)
    with offload.forward() as record:
        output = function(*args, **more)
    record.load_after(output)
    return output
