"""Weights and optimizer state in host memory while other work needs the device, such as generation between updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.sharding.flat_pieces import flat_range


class HostCopy:
    """Moves the memory of a model and its optimizer to the host and back, with the same bits. Memory is released and
    restored inside of the tensors' storages: parameters, views and buffers stay the same objects. Their addresses
    change, so that CUDA graphs must be recorded again. Gradients are not copied: they are zero after :meth:`reload`.
    Between the two calls nothing may read the tensors."""

    def __init__(self, model: Sequence[nn.Module], optimizer: MegatronOptimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._empty: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def is_offloaded(self) -> bool:
        return bool(self._copies or self._empty)

    def offload(self, *, weights: bool = True) -> int:
        """Copy to the host and release the device memory of optimizer state, gradients and, with ``weights``, weights
        and buffers; return the released bytes. Waits for the device. Raises UserError if they are offloaded already."""
        if self.is_offloaded:
            raise UserError("offload: the tensors are in host memory already; call reload first")
        counted: set[int] = set()
        weight_storages = list(_storages(self._weights(), counted))
        copied = list(_storages(self._state(), counted))
        dropped = list(_storages(self._gradients(), counted))
        for storage in [*(weight_storages if weights else []), *copied]:
            source = _bytes(storage)
            host = torch.empty(len(source), dtype=torch.uint8, pin_memory=source.is_cuda)
            host.copy_(source, non_blocking=True)
            self._copies.append((storage, host))
        self._empty = [(storage, storage.nbytes()) for storage in dropped]
        if any(host.is_pinned() for _, host in self._copies):
            torch.cuda.synchronize()
        released = 0
        for storage, size in [*((storage, len(host)) for storage, host in self._copies), *self._empty]:
            storage.resize_(0)
            released += size
        return released

    def reload(self) -> None:
        """Restore the device memory and its bits; gradients are zero. Raises UserError if nothing is offloaded."""
        if not self.is_offloaded:
            raise UserError("reload: nothing is offloaded; call offload first")
        for storage, host in self._copies:
            storage.resize_(len(host))
            _bytes(storage).copy_(host, non_blocking=True)
        for storage, size in self._empty:
            storage.resize_(size)
            _bytes(storage).zero_()
        if any(host.is_pinned() for _, host in self._copies):
            torch.cuda.synchronize()  # the host memory is freed next
        self._copies, self._empty = [], []

    def _weights(self) -> Iterator[Tensor | None]:
        for chunk in self.model:
            yield from chunk.parameters()
            yield from nn.Module.buffers(chunk)  # a data-parallel wrapper has other buffers

    def _gradients(self) -> Iterator[Tensor | None]:
        for chunk in self.model:
            for parameter in chunk.parameters():
                yield getattr(parameter, "main_grad", None)
                yield parameter.grad

    def _state(self) -> Iterator[Tensor | None]:
        if self.optimizer is None:
            return
        for storage in self.optimizer.storage.values():
            yield from (storage.weight, storage.kept)
        for moment in self.optimizer.moments.values():
            yield from (x for x in moment.values() if x.device == self.optimizer.device)


def _storages(tensors: Iterable[Tensor | None], counted: set[int]) -> Iterator[torch.UntypedStorage]:
    """Yield storages (of a DTensor its local shard's) that are not in ``counted``, a set of addresses, which grows."""
    for tensor in tensors:
        if tensor is None:
            continue
        storage = flat_range(tensor)[0].untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
