"""Layout of flat gradient buffers: parameter offsets, buckets and shards as pure functions of sizes. Torch-free.

Used by the gradient buffers and by ``--dry-run``. Parameters are placed in the order in which backward produces their
gradients, each aligned to 64 elements. One collective reduces one bucket. With sharded optimizer state each
data-parallel rank owns an equal contiguous range of every bucket. The ranges may cut parameters at any aligned element,
or, for update rules that own matrices, between parameters only."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT = 64  # elements: every parameter's gradient starts on a 256-byte boundary in fp32
BUS_ALIGNMENT = 2**16  # elements: NCCL reaches full bandwidth only with multiples of a large power of two


class BucketCut(NamedTuple):
    """Parameters and element range of one bucket."""

    stop: int
    """Index of its last parameter plus one."""
    begin: int
    """First element in the buffer."""
    end: int
    """Last element in the buffer plus one, with padding."""


class BufferCut(NamedTuple):
    """Layout of a buffer, in elements."""

    starts: tuple[int, ...]
    """First element of each parameter."""
    buckets: tuple[BucketCut, ...]
    """Buckets in memory order; they cover the buffer without gaps."""
    total: int
    """Size of the buffer, with padding."""


class CutRule(NamedTuple):
    """Where the shards of a buffer may be cut."""

    num_shards: int = 1
    """Equal ranges of every bucket."""
    pad_for_bus: bool = False
    """Whether bucket sizes are multiples of 2^16 elements."""
    block: int = 1
    """Elements that no cut separates, counted from the start of a parameter."""
    full: bool = False
    """Whether shards consist of full parameters. In each bucket a parameter is assigned to the least loaded shard,
    largest first; shards are padded to the largest. A bucket takes more parameters until little of it is padding, and
    its larger shards go to the ranks with fewer elements in the buckets before."""

    @property
    def unit(self) -> int:
        """Divisor of all offsets, in elements."""
        return math.lcm(ALIGNMENT, self.block)

    @property
    def bucket_alignment(self) -> int:
        """Divisor of all bucket sizes, in elements: every shard of a bucket is a multiple of the unit."""
        shards = self.unit * self.num_shards
        return math.lcm(shards, BUS_ALIGNMENT) if self.pad_for_bus else shards


def chosen_bucket_size(
    total: int, *, bucket_size: int | None, num_buckets: int | None, overlap: bool, num_ranks: int
) -> int | None:
    """Return the minimum elements per bucket for ``total`` elements; None: a single bucket. ``num_buckets`` has
    precedence. Default: max(40 million, 1 million x ``num_ranks``) with ``overlap``, else None."""
    if num_buckets is not None:
        return -(-total // num_buckets)
    if bucket_size is None and overlap:
        return max(40_000_000, 1_000_000 * num_ranks)
    return bucket_size


def cut_buffer(sizes: Sequence[int], separate: Sequence[bool], bucket_size: int | None, rule: CutRule) -> BufferCut:
    """Assign parameters to buckets and to offsets in the buffer. ``sizes``: elements in memory order; ``separate``:
    whether a parameter gets a separate bucket; ``bucket_size``: elements from which a bucket is closed, None: never."""
    padded = [-(-size // rule.unit) * rule.unit for size in sizes]
    alignment, regions = rule.bucket_alignment, rule.num_shards if rule.full else 1
    starts: list[int] = []
    buckets: list[BucketCut] = []
    begin = 0
    owned = [0] * regions
    for stop in _bucket_stops(padded, separate, bucket_size, regions):
        members = padded[len(starts) : stop]
        shards, loads = _balanced(members, regions)
        length = -(-max(loads) * regions // alignment) * alignment // regions
        largest_first = sorted(range(regions), key=loads.__getitem__, reverse=True)
        ranks = dict(zip(largest_first, sorted(range(regions), key=owned.__getitem__)))
        offsets = [0] * regions
        for size, shard in zip(members, shards):
            starts.append(begin + ranks[shard] * length + offsets[shard])
            offsets[shard] += size
        for shard, rank in ranks.items():
            owned[rank] += loads[shard]
        buckets.append(BucketCut(stop, begin, begin + length * regions))
        begin = buckets[-1].end
    return BufferCut((*starts, *[begin] * (len(sizes) - len(starts))), tuple(buckets), begin)


NUM_SLOTS = 3
"""Buffers that stream offloaded optimizer state: one loads, one is updated, one stores."""
_MAX_SLOT_BYTES = 1 << 28  # 4.9 ms at 55 GB/s: an update that waits for the SMs of a GEMM does not stop the bus
_MIN_SLICES = 16  # small models still overlap, and their slots stay small next to the state


def slot_bytes(total: int, largest: int) -> int:
    """Return the bytes of each of the :data:`NUM_SLOTS` device buffers for ``total`` bytes of offloaded state.
    ``largest``: bytes of the largest part that cannot be cut, such as the state of a matrix."""
    return -(-max(largest, min(_MAX_SLOT_BYTES, total // _MIN_SLICES)) // 256) * 256


def _bucket_stops(
    sizes: Sequence[int], separate: Sequence[bool], bucket_size: int | None, num_shards: int
) -> Iterator[int]:
    """Yield the index after the last parameter of each bucket: the one that fills it to ``bucket_size`` (None: never)
    with at most :data:`_MAX_PADDING` of padding in full shards, and around ``separate`` parameters."""
    members: list[int] = []
    last = 0
    for index, size in enumerate(sizes):
        if separate[index] and any(members):
            yield index
            members = []
        members.append(size)
        if separate[index] or (bucket_size is not None and sum(members) >= bucket_size and _fills(members, num_shards)):
            yield (last := index + 1)
            members = []
    if any(members) or not last:
        yield len(sizes)


_MAX_PADDING = 1 / 8


def _fills(sizes: Sequence[int], num_shards: int) -> bool:
    """Whether little is padding if ``sizes`` are dealt to equal shards."""
    limit = (1 + _MAX_PADDING) * sum(sizes) / num_shards
    return max(sizes) <= limit and (num_shards == 1 or max(_balanced(sizes, num_shards)[1]) <= limit)


def _balanced(sizes: Sequence[int], num_shards: int) -> tuple[list[int], list[int]]:
    """Deal the largest first, each to the least loaded shard; return the shard of each size, and the loads."""
    loads, shards = [(0, shard) for shard in range(num_shards)], [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, shards[index] = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], shards[index]))
    return shards, [load for load, _ in sorted(loads, key=lambda item: item[1])]


def owned_elements(sizes: Sequence[int], cut: BufferCut, num_shards: int) -> list[int]:
    """Return, for each of ``num_shards`` ranks, the number of parameter elements in its shards, summed over all buckets
    of ``cut`` and without padding. ``sizes``: elements of each parameter, as for :func:`cut_buffer`."""
    owned = [0] * num_shards
    steps = [0] * (num_shards + 1)  # differences of the elements in shards that one parameter fills
    first = 0
    for stop, begin, end in cut.buckets:
        length = (end - begin) // num_shards
        for index in range(first, stop):
            if not sizes[index]:  # the vocabulary size may be unknown yet (0); its bucket may be empty
                continue
            low = cut.starts[index] - begin
            high = low + sizes[index]
            head, tail = low // length, (high - 1) // length
            if head == tail:
                owned[head] += high - low
                continue
            owned[head] += (head + 1) * length - low
            owned[tail] += high - tail * length
            steps[head + 1] += length
            steps[tail] -= length
        first = stop
    return [total + inner for total, inner in zip(owned, accumulate(steps))]
