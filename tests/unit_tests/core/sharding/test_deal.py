"""Matrices are computed once, by the rank to which they are dealt; every rank receives its elements of the results."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding.deal import Deal, assign, sharing_axes
from megatron.core.sharding.full_tensor import take_shard
from megatron.core.sharding.parameter_shard import ParameterShard, full_shard
from megatron.core.sharding.placement import (
    Nested,
    Normal,
    Replicate,
    Shard,
    SubTensor,
    fill_parameter,
    parameter,
)
from megatron.core.sharding.rectangles import Rectangle

PART = SubTensor((6, 4), "weight", Rectangle((2, 0), (4, 4)))
CASES = {
    "tensor_model": {
        "rows": ((8, 6), {"tp": Shard(0)}, None),
        "columns of a stack": ((2, 3, 8), {"tp": Shard(2)}, None),
        "replicated": ((5, 3), {}, None),
        "padded rows": ((7, 3), {"tp": Shard(0)}, (8, 3)),
        "nested": ((4, 4, 3), {"tp": Nested(Shard(0), Shard(1), 1)}, None),
        "nested copies": ((2, 4, 3), {"tp": Nested(Replicate(), Shard(1), 2)}, None),
        "fewer rows than ranks": ((1, 7), {}, None),
        "part": (PART, {"tp": Shard(0)}, None),
    },
    "expert_tensor": {
        "experts": ((6, 4, 5), {"ep": Shard(0), "etp": Shard(1)}, None),
        "gate and up": ((6, 2, 4, 5), {"ep": Shard(0), "etp": Shard(2)}, None),
    },
}


def make(kind, groups):
    results = []
    for name, (shape, mesh, stored) in CASES[kind].items():
        located = {} if groups is SINGLE_PROCESS else {"mesh": mesh, "stored": stored, "ndim": 2}
        param = parameter(shape, init=Normal(1.0), groups=groups, **located)
        fill_parameter(param, param.spec, name, 1, groups)
        results.append(param)
    return results


def rows_of(param, group):
    """This rank's rows, cut as ``fully_shard`` does."""
    chunk = -(-len(param) // group.size) * param.shape[1]
    start, stop = (min((group.rank + at) * chunk, param.numel()) for at in (0, 1))
    return ParameterShard(param, start, stop, param.detach().view(-1)[start:stop], lambda: None, param.dtype, group)


def with_numbers(full, spec):
    """``full`` plus the index of each element in its matrix, so that an element in another place is noticed."""
    shape = full.shape[1:] if spec.is_expert else full.shape
    return full + torch.arange(shape.numel()).view(shape)


def is_right(rank, world_size, kind, sharing):
    """Return (whether the results on this rank are right, number of matrices that this rank has computed)."""
    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2} if kind == "expert_tensor" else {}
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, **sizes)
    groups = parallel_state.get_process_groups()
    data = (groups.expert if kind == "expert_tensor" else groups.dense).reduce
    params = make(kind, groups)
    shards = [rows_of(param, data) if sharing == "rows" else full_shard(param) for param in params]
    axes = sharing_axes(shards[0], data if sharing == "copies" else SINGLE_PROCESS.world, groups)
    deal = Deal(shards, axes, groups, lambda shape, spec: float(torch.Size(shape).numel()))
    count = 0

    def compute(full, specs):
        nonlocal count
        count += sum(len(entry) if spec.is_expert else 1 for entry, spec in zip(full, specs))
        return [with_numbers(entry, spec) for entry, spec in zip(full, specs)]

    values = [item.values.detach() for item in shards]
    results = deal.give_back(compute(deal.collect(values), deal.owned_specs), values)
    right = []
    for result, shard, single in zip(results, shards, make(kind, SINGLE_PROCESS)):
        full = with_numbers(single.detach(), shard.parameter.spec)
        right.append(torch.equal(result, take_shard(full, shard, groups)))
    parallel_state.destroy_model_parallel()
    return right, count


@pytest.mark.parametrize("sharing, world_size", [("copies", 4), ("rows", 4), ("sharded elsewhere", 2), ("copies", 8)])
@pytest.mark.parametrize("kind", CASES)
def test_every_rank_receives_its_elements_of_results_computed_once(gloo_pool, kind, sharing, world_size):
    if kind == "expert_tensor":
        world_size = max(4, world_size)
    outcomes = gloo_pool.run(is_right, world_size, kind, sharing)
    assert all(all(right) for right, _ in outcomes), outcomes
    assert sum(count for _, count in outcomes) == (12 if kind == "expert_tensor" else 8)


def test_work_is_balanced_and_deterministic():
    costs = [5.0, 1.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0]
    owners = assign(costs, 3)
    loads = [sum(cost for cost, owner in zip(costs, owners) if owner == worker) for worker in range(3)]
    assert loads == [9.0, 8.0, 7.0]
    assert assign([1.0] * 4, 2) == [0, 1, 0, 1]
    assert assign([], 2) == []
