"""Report of an out-of-memory error: memory in use by kind, the estimate, and the most effective flags."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.sharding.flat_pieces import flat_range
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.advice import LIBRARIES_GIB, NONE_FITS, memory_advice
from megatron.training.report.memory import RankMemory, estimate_memory

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

_CPU = "can't allocate memory"
_REQUEST = re.compile(r"Tried to allocate ([0-9.]+ [KMG]iB)|you tried to allocate ([0-9]+) bytes")


class OutOfMemory(UserError):
    """Out-of-memory error of a rank; the message is the full report."""


@dataclass(frozen=True)
class HeldMemory:
    """Bytes in use on a rank's device. None: unknown, as during the model build, and for the totals of a CPU."""

    weights: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    total: int | None = None
    """All tensors in PyTorch's allocator."""
    capacity: int | None = None
    """Memory size of the device."""
    device: str = "CPU"

    @property
    def rest(self) -> int | None:
        """Bytes of activations and temporary tensors: the total minus the other fields; None if unknown."""
        if self.total is None or self.weights is None or self.gradients is None or self.optimizer is None:
            return None
        return max(self.total - self.weights - self.gradients - self.optimizer, 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a failed allocation on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error, RuntimeError) and _CPU in str(error)


def measure(model: Iterable[nn.Module], optimizer: MegatronOptimizer) -> HeldMemory:
    """Return the bytes in use on this rank's device by kind, each storage once. No allocation, no wait."""
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    masters, moments = optimizer.storage.values(), optimizer.moments.values()
    counted: set[int] = set()
    weights = _bytes(parameters, counted)
    gradients = _bytes(
        (getattr(parameter, name, None) for parameter in parameters for name in ("main_grad", "grad")), counted
    )
    tensors = [tensor for master in masters for tensor in (master.weight, master.kept)]
    tensors += [tensor for moment in moments for tensor in moment.values()]
    on_device = (tensor for tensor in tensors if tensor is not None and tensor.device == optimizer.device)
    state = _bytes(on_device, counted) + optimizer.host_state.device_bytes
    return replace(measure_device(), weights=weights, gradients=gradients, optimizer=state)


def measure_device() -> HeldMemory:
    """Return the totals of the current GPU; weights, gradients and optimizer state are unknown."""
    if not torch.cuda.is_available():
        return HeldMemory()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return HeldMemory(None, None, None, torch.cuda.memory_allocated(), properties.total_memory, properties.name)


def _bytes(tensors: Iterable[Tensor | None], counted: set[int]) -> int:
    """Return the storage bytes of ``tensors`` (local shard of a DTensor); a view counts with its full storage.
    ``counted``: addresses of storages, extended in place."""
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        storage = flat_range(tensor)[0].untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def out_of_memory(
    error: BaseException,
    cfg: PretrainConfig,
    in_use: HeldMemory,
    *,
    vocab_size: int = 0,
    pipeline_rank: int = 0,
    where: str,
) -> OutOfMemory:
    """Return the error that replaces a failed allocation: requested size, table of memory in use and estimate, and the
    flags that save the most. ``vocab_size``: unpadded, 0: unknown. ``where``: phase of the rank."""
    match = _REQUEST.search(str(error))
    request = f" for {_size(match)}" if match else ""
    total = (
        ""
        if in_use.total is None or in_use.capacity is None
        else f" ({in_use.device}: {in_use.total / 2**30:.1f} GiB in tensors of {in_use.capacity / 2**30:.1f})"
    )
    try:
        estimate = estimate_memory(cfg, vocab_size)[pipeline_rank]
        advice = memory_advice(cfg, vocab_size)
    except (UserError, AttributeError, TypeError, IndexError):  # custom model without a description
        estimate, advice = None, []
    lines = [f"out of memory{request} {where}{total}", *_table(in_use, estimate)]
    if advice and estimate is not None:
        room = math.inf if in_use.capacity is None else in_use.capacity - LIBRARIES_GIB * 2**30
        lines.append(f"these flags help most (estimate now {estimate.total / 2**30:.1f} GiB):")
        lines += [f"  {change.flags}: estimate {change.bytes / 2**30:.1f} GiB" for change in advice]
        if all(change.bytes > room for change in advice):
            lines.append(NONE_FITS)
    else:
        lines.append("use a smaller --micro-batch-size, --recompute-granularity full, or more GPUs")
    return OutOfMemory("\n".join(lines))


def _size(match: re.Match[str]) -> str:
    return match[1] or f"{int(match[2]) / 2**30:.2f} GiB"


def _table(in_use: HeldMemory, estimate: RankMemory | None) -> Iterator[str]:
    """Yield the lines in GiB, in use and estimated ("-" if unknown), then the estimated activations by kind."""

    def cell(size: int | None) -> str:
        return f"{'-':>11}" if size is None else f"{size / 2**30:11.2f}"

    names = "weights", "gradients", "optimizer state", "activations, temporary"
    planned: list[int | None] = [None] * len(names)
    if estimate is not None:
        rest = estimate.activations + estimate.working
        planned = [estimate.weights, estimate.gradients, estimate.optimizer, rest]
    yield f"  {'GiB':<24}{'held':>11}{'estimate':>11}"
    for name, used, expected in zip(names, (in_use.weights, in_use.gradients, in_use.optimizer, in_use.rest), planned):
        yield f"  {name:<24}{cell(used)}{cell(expected)}"
    for kind, size in ({} if estimate is None else estimate.kinds).items():
        yield f"    {kind:<22}{'':>11}{cell(size)}"
