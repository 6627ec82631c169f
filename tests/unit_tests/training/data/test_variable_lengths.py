"""Shares of planned batches: rows of every rank hold all samples once, counted once, also through worker processes."""

from collections import Counter

import numpy as np
import pytest
import torch

from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import Group
from megatron.core.schedules.variable_lengths import CostModel, Ranks
from megatron.training.config.variable_lengths import PlanSettings
from megatron.training.data.loader import EvalSampler
from megatron.training.data.variable_lengths import FullBatch, PlannedSampler, Rows, planned_loader

LENGTHS = [5, 31, 1, 8, 16, 9, 3, 24, 2, 2, 7, 12]


class Samples:
    """Sample i has the tokens 100 i, 100 i + 1, ..."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        tokens = 100 * index + np.arange(LENGTHS[index])
        mask = (np.arange(len(tokens)) % 3 > 0).astype(np.float32)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": mask, "position_ids": np.arange(len(tokens))}

    def sample_lengths(self, samples):
        return np.array(LENGTHS)[samples]


def settings(count, limit, aligned=0):
    return PlanSettings(Ranks(count, limit, aligned=aligned), CostModel(1.0, 0.01), 1, 2)


def shares(count, limit, num_workers=0, aligned=0):
    """[global batch][rank] -> share"""
    ranks = []
    for rank in range(count):
        batches = EvalSampler(FullBatch(), 5, len(LENGTHS))  # the last batch has two samples
        ranks.append(list(planned_loader(Samples(), batches, settings(count, limit, aligned), rank, num_workers)))
    return [list(item) for item in zip(*ranks)]


def build_rows(rank, count):
    layouts = {}
    for size in (1, 2, 4):
        first = rank // size * size
        layouts[size] = TokenLayout(Group("cp", tuple(range(first, first + size)), rank - first))
    return Rows(layouts, 2, rank)


@pytest.mark.parametrize("count, limit, aligned", [(1, 32, 0), (2, 16, 0), (4, 8, 0), (4, 8, 2)])
def test_ranks_hold_every_token_of_a_batch_once(count, limit, aligned):
    batches = shares(count, limit, aligned=aligned)
    assert len(batches) == 3
    observed = Counter()
    for share in batches:
        counted = 0.0
        for rank, item in enumerate(share):
            rows = build_rows(rank, count)
            counted += float(rows.count(item))
            split = rows.split(item)
            assert not aligned or len(split) % aligned == 0
            for row in split:
                local, layout = rows.local(row)
                assert local["tokens"].shape[1] <= limit and local["tokens"].shape[1] * row["size"] % 2 == 0
                used = local["sample_index"] >= 0
                sample = local["sample_index"][used]
                assert (local["tokens"][used] == 100 * sample + local["position_ids"][used]).all()
                assert layout.padding == int((row["sample_index"] < 0).sum())
                observed.update(local["tokens"][used].tolist())
                bounds = row["documents"].cu_seqlens_q
                assert bounds[0] == 0 and bounds[-1] == row["tokens"].shape[1]
                assert row["loss_mask"][0, row["tokens"].shape[1] - layout.padding :].sum() == 0
        indices = {int(i) for item in share for i in item["sample_index"] if i >= 0}
        assert counted == sum(float(Samples()[i]["loss_mask"].sum()) for i in indices)
    assert observed == Counter(int(token) for i in range(len(LENGTHS)) for token in Samples()[i]["tokens"])


def test_worker_processes_give_the_same_shares():
    for one, other in zip(shares(2, 16), shares(2, 16, num_workers=1)):
        for left, right in zip(one, other):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)


def test_figures_describe_the_full_batch_on_every_rank():
    first, *remaining = shares(4, 8)[0]
    imbalance, tokens, squares, *sizes = first["plan"].tolist()
    assert (tokens, squares) == (sum(LENGTHS[:5]), sum(length**2 for length in LENGTHS[:5]))
    assert sizes[2] >= 1 and imbalance >= 0
    assert all(torch.equal(first["plan"], other["plan"]) for other in remaining)


def test_a_data_set_without_lengths_is_named():
    with pytest.raises(UserError, match="list has no sample_lengths"):
        PlannedSampler([], [], settings(1, 8), 0)
