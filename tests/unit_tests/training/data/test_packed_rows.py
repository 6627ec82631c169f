"""Packed rows of a global batch, distributed for equal attention work."""

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.training.data.loader import PADDING, EvalSampler, TrainSampler, sequential
from megatron.training.data.packed_rows import BalancedSampler, FullBatch, balance


class Costs:
    def __init__(self, costs):
        self.costs = np.asarray(costs)

    def attention_costs(self, rows):
        return self.costs[rows]


@pytest.mark.parametrize("size, ranks", [(1, 1), (1, 4), (2, 3), (4, 2)])
def test_every_row_goes_to_one_rank(size, ranks):
    costs = np.random.default_rng(size).integers(1, 1000, 6 * size * ranks).tolist()
    shares = balance(costs, size, ranks)
    assert all(len(share) == 6 and all(len(rows) == size for rows in share) for share in shares)
    assert sorted(row for share in shares for rows in share for row in rows) == list(range(len(costs)))


def test_ranks_have_similar_work():
    """Rows of 8,192 tokens: one conversation costs 64 times the work of 64 short ones."""
    generator = np.random.default_rng(0)
    costs = (8192**2 / generator.integers(1, 65, 256)).astype(int).tolist()
    work = [sum(costs[row] for rows in share for row in rows) for share in balance(costs, 1, 8)]
    in_order = [sum(costs[rank::8]) for rank in range(8)]
    assert max(work) / min(work) < 1.15 < 2 < max(in_order) / min(in_order)
    # ranks may wait for each other in each micro-batch
    steps = [[costs[rows[0]] for rows in step] for step in zip(*balance(costs, 1, 8))]
    assert sum(map(max, steps)) < 1.3 * sum(costs) / 8 < sum(max(costs[at : at + 8]) for at in range(0, 256, 8)) / 2


def keys(rank, ranks, dataset, sampler):
    sampler.shard = FullBatch(2, rank, ranks)
    return [key for batch in BalancedSampler(sampler, dataset) for key in batch]


def test_global_batches_do_not_depend_on_the_ranks():
    dataset = Costs(np.random.default_rng(3).integers(1, 99, 24))

    def sampler():
        return TrainSampler(None, lambda _: 12, sequential, 0, 24)

    one = keys(0, 1, dataset, sampler())
    three = [keys(rank, 3, dataset, sampler()) for rank in range(3)]
    for batch in range(2):
        rows = [key for rank in three for key in rank[4 * batch : 4 * batch + 4]]
        assert sorted(rows) == sorted(one[12 * batch : 12 * batch + 12])


def test_padding_of_an_evaluation_is_kept():
    sampler = EvalSampler(None, 8, 5)
    rows = [key for rank in range(2) for key in keys(rank, 2, Costs(range(5)), sampler)]
    assert sorted(index for _, index in rows) == [PADDING] * 3 + list(range(5))


def test_batch_that_ranks_do_not_divide_is_an_error():
    with pytest.raises(UserError, match="--global-batch-size 6: not divisible"):
        list(FullBatch(2, 0, 2).slices(0, 6))
