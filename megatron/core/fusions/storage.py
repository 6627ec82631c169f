"""Storage of model weights: their exact values for the optimizer, what an all-gather sends, and what GEMMs read.

If the model computes in half precision, an update is usually smaller than the weight's last bit, so that the master is
fp32. It is stored as an fp32 copy (4 bytes) or, for bf16, as a 16-bit remainder (2 bytes, ``Remainder``), which gives
the exact fp32 value together with the weight:

    fp32 = high * 2^16 + low        weight = high, plus one if low >= 2^15;  remainder = low

This rounds to nearest with ties up, while bf16 weights are rounded to nearest with ties to even. A tie that was rounded
down could not be reconstructed. Masters of bf16 models are therefore never such ties: if an update ends on one (one
time in 2^17), the master becomes the next fp32 number toward zero, which differs by one ulp and has the same weight.
This applies to masters of every kind, so that all kinds give bit-identical training.

Moments may be stored in bf16: they are widened, updated in fp32, and rounded to nearest."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.groups.process_groups import Group

HALF = (torch.bfloat16, torch.float16)


def nudge_rounding_ties_(main: Tensor) -> Tensor:
    """In place, move fp32 values on a bf16 tie that rounds toward zero to the next fp32 number toward zero, so that
    split/join is exact. Returns ``main``."""
    # a tie that rounds to even toward zero: the last bf16 bit (bit 16) is 0 and the low half is exactly 2^15
    bits = main.view(torch.int32)
    bits.sub_(((bits & 0x1FFFF) == 0x8000).to(torch.int32))
    return main


def split_fp32(main: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into (bf16, int16 remainder); :func:`join_fp32` inverts it for every bit pattern. The bf16 value is
    ``main`` rounded to nearest, provided that :func:`nudge_rounding_ties_` was applied."""
    bits = main.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # the low half: the conversion wraps
    high = (bits >> 16) - (remainder >> 15)  # plus one if the low half is at least 2^15
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join_fp32(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 value of a bf16 weight and its int16 remainder; inverse of :func:`split_fp32`."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) + (remainder >> 15)  # undoes the plus one
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


class OwnedRange(Protocol):
    """Range of a parameter that this rank updates, as far as storages depend on it (``ParameterShard``)."""

    parameter: nn.Parameter
    start: int
    stop: int
    values: Tensor
    """Weights of the range, flat."""


class Storage:
    """Storage of one weight, or the shard of it that this rank updates. This base class is the simplest kind: the
    weight itself is exact (fp32, fp64), and an all-gather sends it as it is. ``declare(parameter, storage=Kind)``
    declares another kind for a parameter; without a declaration :func:`build_storage` chooses one.

    A kind that gathers something else (8-bit blocks with scales) sets ``block`` and ``payload_bytes`` and defines
    :meth:`payload` and :meth:`install`. Buffers start every parameter at a multiple of ``block`` elements and cut
    shards at such multiples only, so that the blocks do not depend on the number of ranks.

    Args:
        weight: the model's weight, or the shard of it that this rank updates; contiguous. The storage keeps a
            reference, and GEMMs read this memory."""

    kept_dtype: torch.dtype | None = None
    """Dtype of ``kept``; None without extra storage."""
    nudges_ties = False
    """Whether the model computes with the weight in bf16, so that ties must be avoided."""
    is_live = True
    """Whether :meth:`read` returns the storage of the exact value rather than a copy."""
    saves_master = False
    """Whether a checkpoint holds the exact value next to the weight, which is rounded."""
    gathers_copies: ClassVar[bool] = False
    """Whether GEMMs read the gathered payload itself, so that :meth:`install` does not run; weights outside of this
    rank's shards are then not kept, and :meth:`install_copy` writes them on demand."""
    block: ClassVar[int] = 1
    """Elements per block of the payload."""
    payload_bytes: ClassVar[int | None] = None
    """Bytes of the payload per block; None: an all-gather sends the weight itself, in place."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self.kept: Tensor | None = None
        """Extra storage, shaped as the weight (fp32 copy or int16 remainder); set by the buffer owner before use."""

    @classmethod
    def build(cls, weight: Tensor, *, split: bool) -> Storage:
        """Build the storage of a parameter that declares this kind. ``split`` prefers a 16-bit remainder."""
        return cls(weight)

    def with_kept(self, kept: Tensor | None, part: slice | None = None) -> Storage:
        """Return a storage of this kind with ``kept`` as extra storage and the same weight, or the range ``part`` of
        its flat elements. For the time of an update of state that is kept elsewhere."""
        storage = copy.copy(self)
        storage.weight, storage.kept = self.weight if part is None else self.weight.view(-1)[part], kept
        return storage

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the exact value is read, written and updated."""
        return self.weight.dtype if self.kept_dtype is None else torch.float32

    def read(self) -> Tensor:
        """Return the exact value: the storage itself if :attr:`is_live`, else a copy."""
        return self.weight

    def write(self, value: Tensor) -> None:
        """Set the exact value, and the weight as :meth:`install` would write it. ``value`` may be the result of
        :meth:`read`, changed in place; any other tensor is copied and not changed."""
        if value is not self.weight:
            self.weight.copy_(value)

    def refresh(self) -> None:
        """Set the exact value to the weight after the weight was changed from outside."""

    @classmethod
    def adopt(cls, parameter: Tensor, payload: Tensor) -> None:
        """Called once with the payload of all blocks of ``parameter``, a view of gathered memory."""

    @classmethod
    def prepare(cls, parameters: Sequence[Tensor], shards: Sequence[OwnedRange], group: Group) -> None:
        """Compute what payloads depend on, such as scales of full ``parameters``, before each all-gather. ``shards``:
        ranges that this rank updates. May be collective over ``group``, which gathers."""

    @classmethod
    def install_copy(cls, parameter: Tensor) -> None:
        """Write the rounded values of the payload to all of ``parameter``, with ``gathers_copies``."""

    def payload(self) -> Tensor:
        """Return what an all-gather sends: uint8 [blocks, ``payload_bytes``], the last block padded."""
        raise NotImplementedError

    @classmethod
    def install(cls, payload: Tensor, weight: Tensor) -> None:
        """Write what GEMMs read: the flat ``weight`` from the ``payload`` uint8 [blocks, ``payload_bytes``] of all its
        blocks. Runs on every rank for the shards of all ranks."""
        raise NotImplementedError


class FSDPStorage(Storage):
    """fp32 shard of a weight of a half-precision model; ``fully_shard`` rounds it when it all-gathers."""

    saves_master = True

    def __init__(self, weight: Tensor, compute_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(weight)
        self.nudges_ties = compute_dtype == torch.bfloat16

    def write(self, value: Tensor) -> None:
        super().write(value)
        if self.nudges_ties:
            nudge_rounding_ties_(self.weight)


class Copy(Storage):
    """fp32 copy of a half-precision weight."""

    kept_dtype = torch.float32
    saves_master = True
    kept: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.nudges_ties = weight.dtype == torch.bfloat16

    def read(self) -> Tensor:
        return self.kept

    def write(self, value: Tensor) -> None:
        """Copy ``value`` to the fp32 copy, move ties of this copy for bf16 weights, and round it to the weight."""
        if value is not self.kept:
            self.kept.copy_(value)
        self.weight.copy_(nudge_rounding_ties_(self.kept) if self.nudges_ties else self.kept)

    def refresh(self) -> None:
        self.kept.copy_(self.weight)


class Remainder(Storage):
    """bf16 weight plus an int16 remainder that together hold the fp32 value."""

    kept_dtype = torch.int16
    kept: Tensor
    nudges_ties, is_live, saves_master = True, False, True

    def read(self) -> Tensor:
        return join_fp32(self.weight, self.kept)

    def write(self, value: Tensor) -> None:
        weight, remainder = split_fp32(nudge_rounding_ties_(value.to(torch.float32, copy=True)))
        self.weight.copy_(weight)
        self.kept.copy_(remainder)

    def refresh(self) -> None:
        self.kept.zero_()


def build_storage(
    values: Tensor, compute_dtype: torch.dtype, *, split: bool, declared: type[Storage] | None = None
) -> Storage:
    """Build the storage of the weight in ``values``, with which the model computes in ``compute_dtype``: of the kind
    ``declared``; else with ``split`` a 16-bit remainder for bf16, an fp32 copy for half precision, and the values
    themselves for wider dtypes. Keeps a reference to ``values``; extra storage is set later."""
    if declared is not None:
        return declared.build(values, split=split)
    if values.dtype == torch.bfloat16 and split:
        return Remainder(values)
    if values.dtype in HALF:
        return Copy(values)
    return FSDPStorage(values, compute_dtype) if compute_dtype in HALF else Storage(values)


@dataclass(slots=True)
class OptimizerEntry:
    """Inputs of the update of one tensor."""

    storage: Storage
    gradient: Tensor
    moments: tuple[Tensor, ...]
    lr: float
    weight_decay: float

    @property
    def is_plain(self) -> bool:
        """Whether all of its state can be updated in place."""
        return self.storage.is_live and all(moment.dtype == self.storage.dtype for moment in self.moments)

    def scaled_gradient(self, factor: Tensor | None, *, decoupled: bool) -> Tensor:
        """Return the gradient times ``factor`` (None: 1), in the dtype of the first moment, plus the decay of the
        master unless it is ``decoupled``. May be the gradient itself: do not write to it."""
        gradient = self.gradient.to(self.moments[0].dtype)
        if factor is not None:
            gradient = gradient * factor.to(gradient.dtype)
        return gradient if decoupled else gradient + self.weight_decay * self.storage.read()

    def write(self, skip: Tensor, master: Tensor | None, *moments: Tensor) -> None:
        """Set the master (None: keep it) and the first moments, unless ``skip`` (0-d) is 1."""
        applies = skip == 0
        # where, not a factor of zero: a skipped step may have NaN in the gradient
        for old, new in zip(self.moments, moments):
            old.copy_(torch.where(applies, new, old))
        if master is not None:
            self.storage.write(torch.where(applies, master, self.storage.read()))


def by_rates(entries: Iterable[OptimizerEntry]) -> dict[tuple[float, float], list[OptimizerEntry]]:
    """Group ``entries`` by (learning rate, weight decay), which foreach operators and kernels take as numbers."""
    groups: dict[tuple[float, float], list[OptimizerEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.lr, entry.weight_decay), []).append(entry)
    return groups


class Opened(NamedTuple):
    """Lists of tensors of one dtype (fp32, fp64) for a foreach operator."""

    masters: list[Tensor]
    gradients: list[Tensor]
    moments: list[list[Tensor]]
    """One list per kind of moment."""


def as_fp32_lists(tensors: Sequence[OptimizerEntry], factor: Tensor | None) -> Iterator[Opened]:
    """Yield foreach lists in the master dtype for in-place updates: all plain tensors first, then each other tensor,
    widened; after the loop body masters and moments are written back (masters also to the weights), so that the loop
    must run to its end. ``factor`` multiplies gradients, in place if of master dtype; None: 1."""
    plain = [entry for entry in tensors if entry.is_plain]
    for batch in ([plain] if plain else []) + [[entry] for entry in tensors if not entry.is_plain]:
        masters = [entry.storage.read() for entry in batch]
        gradients = [entry.gradient.to(main.dtype) for entry, main in zip(batch, masters)]
        if factor is not None:
            torch._foreach_mul_(gradients, factor.to(masters[0].dtype))
        kinds = list(zip(*(entry.moments for entry in batch)))
        moments = [[moment.to(masters[0].dtype) for moment in kind] for kind in kinds]
        yield Opened(masters, gradients, moments)
        for entry, main in zip(batch, masters):
            entry.storage.write(main)
        for kind, values in zip(kinds, moments):
            for moment, value in zip(kind, values):
                if moment is not value:
                    moment.copy_(value)
