"""Norms and counts see every element of the model once, in wide sums: over any rank grid, of any dtype.

Ranks are simulated: what each of them gives to a sum, and what the sums over its groups add up.
"""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megatron.core.groups.process_groups import SINGLE_PROCESS, Group, RankGrid, build_process_groups
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_coefficient, count_zeros, l2_norm
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.sharding.placement import Replicate, Shard, Zeros, parameter, stored_rectangle

CPU = torch.device("cpu")
SHAPES = {
    "dense replicated": ((8,), {}), "dense by tp": ((8, 2), {"tp": Shard(0)}),
    "experts by ep": ((8, 2), {"ep": Shard(0)}), "experts by ep and etp": ((8, 4), {"ep": Shard(0), "etp": Shard(1)}),
    "experts by etp": ((8,), {"ep": Replicate(), "etp": Shard(0)}), "all experts'": ((4,), {"ep": Replicate()}),
}  # fmt: skip
GRIDS = [
    {"dp": 4}, {"dp": 4, "ep": 2}, {"tp": 2, "dp": 4, "ep": 2}, {"tp": 2, "dp": 4, "ep": 2, "etp": 1},
    {"tp": 2, "dp": 4, "ep": 4, "etp": 1}, {"tp": 2, "dp": 4, "ep": 4}, {"tp": 4, "dp": 4, "ep": 2, "etp": 2},
    {"dp": 8, "ep": 2, "etp": 2}, {"dp": 4, "etp": 2}, {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "etp": 1},
    {"tp": 2, "cp": 2, "dp": 2, "ep": 2}, {"tp": 2, "pp": 2, "dp": 4, "ep": 2}, {"tp": 2, "dp": 4, "etp": 1},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 1}, {"pp": 2, "dp": 4, "ep": 2, "etp": 2},
    {"dp": 8, "ep": 2, "optimizer_instances": 2}, {"tp": 2, "dp": 8, "ep": 2, "etp": 1, "optimizer_instances": 2},
]  # fmt: skip


def contributions(grid, rank, shards_optimizer):
    """Return for each share of one rank its elements, by name and index, and the ranks of each sum."""
    groups = build_process_groups(grid, rank, lambda name, lists: (object(), None))
    optimizer = MegatronOptimizer.__new__(MegatronOptimizer)
    optimizer.groups, optimizer.shards_optimizer, stored = groups, shards_optimizer, {}
    optimizer.model_params = {
        f"{name} of stage {groups.pp.rank}": parameter(shape, init=Zeros(), mesh=mesh, groups=groups)
        for name, (shape, mesh) in SHAPES.items()
    }
    for name, param in optimizer.model_params.items():
        numbers = np.arange(np.prod(param.spec.shape)).reshape(param.spec.shape)
        place, shard = stored_rectangle(param.spec, groups), groups.dp_cp_shard
        if name.startswith(("experts", "all experts")):
            shard = groups.edp_shard
        local = numbers[tuple(slice(at, at + size) for at, size in zip(place.offsets, place.lengths))].flatten()
        stored[name] = np.array_split(local, shard.size)[shard.rank] if shards_optimizer else local
    optimizer.counted_names = {
        ranks: [name for name in optimizer.model_params if optimizer._is_counted(name, ranks)]
        for ranks in groups.data_parallel
    }
    shares = optimizer._shares(lambda name: [(name, int(number)) for number in stored[name]])
    return [(Counter(elements), [group.ranks for group in summed]) for elements, summed in shares]


@pytest.mark.parametrize("shards_optimizer", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("sizes", GRIDS, ids=lambda sizes: " ".join(f"{axis}{size}" for axis, size in sizes.items()))
def test_every_rank_sums_every_element_of_the_model_once(sizes, shards_optimizer):
    grid = RankGrid(**sizes)
    ranks = [contributions(grid, rank, shards_optimizer) for rank in range(grid.world_size)]
    totals = [Counter() for _ in ranks]
    for share in range(len(ranks[0])):
        values = [local[share][0] for local in ranks]
        for step in range(len(ranks[0][share][1])):
            members = [local[share][1][step] for local in ranks]
            assert all(members[item] == group for group in members for item in group), "a collective of the same ranks"
            values = [sum((values[item] for item in group), Counter()) for group in members]
        totals = [total + value for total, value in zip(totals, values)]
    full = {
        (f"{name} of stage {stage}", number): 1
        for (name, (shape, _)), stage in itertools.product(SHAPES.items(), range(grid.pp))
        for number in range(int(np.prod(shape)))
    }
    assert all(total == full for total in totals)


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norms_are_not_rounded_to_the_dtype_of_gradients(dtype):
    """A norm in bf16 has three digits; a sum of squares in bf16 stops at 256 ones, one in fp16 overflows at 65504."""
    tensors = [torch.full((3000,), 7.0, dtype=dtype), torch.full((5,), 0.5, dtype=dtype)]
    result = l2_norm([(tensors, ())], CPU)
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx((3000 * 49 + 5 * 0.25) ** 0.5, rel=1e-6)


def test_sums_of_squares_of_several_tensors_are_fp64():
    """Tensors of norm 1 next to one of norm 2^13: in fp32 their squares are rounded away."""
    tensors = [torch.full((1,), 8192.0), *(torch.ones(1) for _ in range(8))]
    assert l2_norm([(tensors, ())], CPU).square().item() == pytest.approx(2.0**26 + 8, abs=1e-6)
    assert l2_norm([(tensors[:1], ()), (tensors[1:], ())], CPU).square().item() == pytest.approx(2.0**26 + 8, abs=1e-6)
    mixed = [torch.full((1,), 2.0**40, dtype=torch.float64), torch.full((1,), 3.0), torch.full((4,), 2.0).bfloat16()]
    assert l2_norm([(mixed, ())], CPU).square().item() == pytest.approx(2.0**80 + 25, rel=1e-14)
    later = [torch.full((1,), 3.0, dtype=torch.float64), torch.full((301,), 7.0).bfloat16()]
    assert l2_norm([(later, ())], CPU).square().item() == pytest.approx(9 + 301 * 49, rel=1e-6)
    assert l2_norm([([], ())], CPU).item() == 0.0 and l2_norm([([], ())], CPU).dtype == torch.float64


def test_zeros_are_counted_exactly():
    tensors = [torch.zeros(2**24 + 3, dtype=torch.bfloat16), torch.tensor([0.0, -0.0, 1e-30, float("nan")])]
    result = count_zeros([(tensors, ()), ([torch.zeros(1)], ())], CPU)
    assert result.dtype == torch.int64 and result.item() == 2**24 + 6


def test_clipping_brings_a_norm_down_and_never_up():
    norms = torch.tensor([0.0, 0.5, 1.0, 2.0, 1e6], dtype=torch.float64)
    result = torch.stack([clip_coefficient(norm, 1.0) for norm in norms])
    torch.testing.assert_close(result, (1.0 / (norms + 1e-6)).clamp(max=1.0), rtol=1e-12, atol=0.0)


# ---- padding


class Table(nn.Module):
    """A vocabulary of five, padded to eight rows."""

    def __init__(self, groups):
        super().__init__()
        self.words = parameter((5, 3), init=Zeros(), mesh={"tp": Shard(0)}, stored=(8, 3), groups=groups)
        self.bias = parameter((3,), init=Zeros(), groups=groups)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zeros_of_padding_are_not_counted(ranks, monkeypatch):
    """Four of the 5 x 3 true elements and two elements of the bias are zeros, and nine elements of padding."""
    monkeypatch.setattr("megatron.core.optimizer.clip_grads.dist.all_reduce", lambda *args, **kwargs: None)
    words, results = torch.ones(8, 3), []
    words[5:], words[1], words[4, 0] = 0.0, 0.0, 0.0
    for rank in range(ranks):
        tp = Group("tp", tuple(range(ranks)), rank)
        net = Table(groups := replace(SINGLE_PROCESS, tp=tp, tp_pp=replace(tp, name="tp_pp")))
        net.words.grad, net.bias.grad = words.chunk(ranks)[rank].clone(), torch.tensor([0.0, 1.0, 0.0])
        config = OptimizerConfig(lr=0.1, log_num_zeros_in_grad=True)
        optimizer = get_megatron_optimizer(config, [net], groups=groups)
        results.append(optimizer.step()[2])
    assert sum(results) == 4 + 2
