"""Cuts of flat buffers: offsets, buckets, and shards that consist of full parameters."""

import math
import random

import pytest

from megatron.core.sharding.buffer_layout import CutRule, chosen_bucket_size, cut_buffer, owned_elements

SIZES = [random.Random(seed).choices([1, 63, 64, 65, 1000, 4096, 5000], k=17) for seed in range(4)]


def in_order(sizes, separate, bucket_size, alignment):
    """Offsets and bucket ends by a cursor, without balancing."""
    starts, ends, cursor, begin = [], [], 0, 0
    for size, single in zip(sizes, separate):
        if single and cursor > begin:
            cursor = begin = -(-cursor // alignment) * alignment
            ends.append(cursor)
        starts.append(cursor)
        cursor += -(-size // 64) * 64
        if single or (bucket_size is not None and cursor - begin >= bucket_size):
            cursor = begin = -(-cursor // alignment) * alignment
            ends.append(cursor)
    if cursor > begin or not ends:
        ends.append(-(-cursor // alignment) * alignment)
    return starts, ends


@pytest.mark.parametrize("bucket_size", [None, 1, 3000, 4096])
@pytest.mark.parametrize("sizes", SIZES)
def test_elements_are_laid_out_in_order(sizes, bucket_size):
    single = [index % 5 == 3 for index in range(len(sizes))]
    cut = cut_buffer(sizes, single, bucket_size, CutRule(4))
    starts, ends = in_order(sizes, single, bucket_size, 256)
    assert list(cut.starts) == starts and [bucket.end for bucket in cut.buckets] == ends
    assert cut.total == ends[-1] and sum(owned_elements(sizes, cut, 4)) == sum(sizes)


@pytest.mark.parametrize("block", [1, 96, 128])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_shards_of_full_parameters_are_balanced(sizes, pad, block):
    shards, unit = 3, math.lcm(64, block)
    rule = CutRule(shards, pad, block, full=True)
    cut = cut_buffer(sizes, [False] * len(sizes), 9000, rule)
    selected, first = set(), 0
    for stop, begin, end in cut.buckets:
        length, loads = (end - begin) // shards, [0] * shards
        assert (end - begin) % shards == 0 and length % unit == 0
        for index in range(first, stop):
            start = cut.starts[index]
            shard = (start - begin) // length
            assert start % unit == 0 and start + sizes[index] <= begin + (shard + 1) * length, "cut between ranks"
            used = set(range(start, start + sizes[index]))
            assert not used & selected
            selected |= used
            loads[shard] += -(-sizes[index] // unit) * unit
        largest = max(-(-size // unit) * unit for size in sizes[first:stop])
        assert max(loads) <= sum(loads) / shards + largest
        assert end - begin - shards * max(loads) < rule.bucket_alignment, "more padding than the alignment needs"
        first = stop
    assert first == len(sizes) and sum(owned_elements(sizes, cut, shards)) == sum(sizes)


LLAMA_8B_LAYER = [58_720_256, 117_440_512, 16_777_216, 25_165_824]


@pytest.mark.parametrize("shards", [2, 4, 8, 16])
def test_full_parameters_of_many_layers_need_little_padding(shards):
    """Buckets of one matrix each would give all of them to one rank, and pad the buffer by as many ranks."""
    sizes = LLAMA_8B_LAYER * 32
    cut = cut_buffer(sizes, [False] * len(sizes), 40_000_000, CutRule(shards, full=True))
    owned = owned_elements(sizes, cut, shards)
    assert len(cut.buckets) >= 4 and cut.total <= 1.15 * sum(sizes)
    assert max(owned) <= 1.05 * sum(sizes) / shards


def test_larger_shards_go_to_ranks_with_fewer_elements():
    sizes = [3, 1, 3, 1]
    cut = cut_buffer([64 * size for size in sizes], [True] * 4, None, CutRule(2, full=True))
    assert owned_elements([64 * size for size in sizes], cut, 2) == [64 * 4, 64 * 4]


def test_a_buffer_without_elements_has_one_bucket():
    assert cut_buffer([], [], None, CutRule()).buckets == ((0, 0, 0),)
    assert cut_buffer([0], [False], None, CutRule()).buckets == ((1, 0, 0),)
    assert len(cut_buffer([0, 0], [False, False], 10, CutRule()).starts) == 2


@pytest.mark.parametrize(
    "bucket_size, num_buckets, overlap, num_ranks, expected",
    [
        (None, None, False, 8, None), (None, None, True, 8, 40_000_000), (None, None, True, 64, 64_000_000),
        (500, None, False, 8, 500), (500, None, True, 8, 500), (None, 3, False, 8, 334), (500, 3, True, 8, 334),
    ],
)  # fmt: skip
def test_number_of_buckets_goes_before_their_size(bucket_size, num_buckets, overlap, num_ranks, expected):
    actual = chosen_bucket_size(
        1000, bucket_size=bucket_size, num_buckets=num_buckets, overlap=overlap, num_ranks=num_ranks
    )
    assert actual == expected
