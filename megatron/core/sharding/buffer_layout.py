"""The cut of flat gradient memory into buckets and shards: pure functions of sizes, read by the buffers themselves and
by ``--dry-run``. Torch-free.

Parameters lie in the order in which backward produces their gradients, each on a 64-element boundary; a bucket is the
unit of one collective. Where data-parallel ranks share out the update, each owns an equal stretch of every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 64  # elements: every parameter's gradient starts on a 256-byte boundary in fp32
BUS_ALIGNMENT = 2**16  # elements: NCCL reaches its bandwidth with messages of whole powers of two


class BucketCut(NamedTuple):
    """One bucket."""

    stop: int
    """One past the index of its last parameter."""
    begin: int
    end: int
    """Its stretch of the buffer, in elements."""


class BufferCut(NamedTuple):
    """A whole buffer, in elements."""

    starts: tuple[int, ...]
    """First element of each parameter."""
    buckets: tuple[BucketCut, ...]
    total: int


def bucket_alignment(num_shards: int, pad_for_bus: bool) -> int:
    """Every bucket's size is a multiple of it."""
    shards = ALIGNMENT * num_shards
    return math.lcm(shards, BUS_ALIGNMENT) if pad_for_bus else shards


def chosen_bucket_size(
    total: int, *, bucket_size: int | None, num_buckets: int | None, overlap: bool, num_ranks: int
) -> int | None:
    """Least elements of a bucket for ``total`` parameters of a model chunk; None is one bucket for everything."""
    if num_buckets is not None:
        return -(-total // num_buckets)
    if bucket_size is None and overlap:
        return max(40_000_000, 1_000_000 * num_ranks)
    return bucket_size


def cut_buffer(sizes: Sequence[int], alone: Sequence[bool], bucket_size: int | None, alignment: int) -> BufferCut:
    """Places parameters of ``sizes`` elements.

    Args:
        sizes: in the order of memory.
        alone: which of them get a bucket each.
        bucket_size: a bucket is closed once it has so many elements.
        alignment: of the buckets' sizes.
    """
    starts: list[int] = []
    buckets: list[BucketCut] = []
    cursor = begin = 0

    def close(stop: int) -> None:
        nonlocal cursor, begin
        cursor = -(-cursor // alignment) * alignment
        buckets.append(BucketCut(stop, begin, cursor))
        begin = cursor

    for index, size in enumerate(sizes):
        if alone[index] and cursor > begin:
            close(index)
        starts.append(cursor)
        cursor += -(-size // ALIGNMENT) * ALIGNMENT
        if alone[index] or (bucket_size is not None and cursor - begin >= bucket_size):
            close(index + 1)
    if cursor > begin or not buckets:
        close(len(sizes))
    return BufferCut(tuple(starts), tuple(buckets), cursor)


def owned_elements(sizes: Sequence[int], cut: BufferCut, num_shards: int) -> list[int]:
    """Elements of parameters in each shard; the rest of a buffer is padding."""
    owned = [0] * num_shards
    first = 0
    for stop, begin, end in cut.buckets:
        length = (end - begin) // num_shards
        for index in range(first, stop):
            if not sizes[index]:  # of a vocabulary that is not known yet; its bucket may be empty
                continue
            low = cut.starts[index]
            high = low + sizes[index]
            for shard in range((low - begin) // length, -(-(high - begin) // length)):
                left = begin + shard * length
                owned[shard] += min(high, left + length) - max(low, left)
        first = stop
    return owned
