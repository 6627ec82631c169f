"""Shards are joined to the global tensor in its logical order, and taken from it again, for every kind of placement."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding.full_tensor import gather_full, take_shard
from megatron.core.sharding.parameter_shard import ParameterShard, full_shard
from megatron.core.sharding.placement import Nested, Normal, Replicate, Shard, SubTensor, fill_parameter, parameter
from megatron.core.sharding.rectangles import Rectangle

CASES = {
    "rows": ((8, 6), {"tp": Shard(0)}, None),
    "columns of a stack": ((2, 3, 8), {"tp": Shard(2)}, None),
    "gate and up": ((2, 8, 3), {"tp": Shard(1)}, None),
    "replicated": ((4, 3), {}, None),
    "padded rows": ((7, 3), {"tp": Shard(0)}, (8, 3)),
    "nested": ((2, 4, 3), {"tp": Nested(Shard(0), Shard(1), 2)}, None),
    "nested copies": ((2, 4, 3), {"tp": Nested(Shard(0), Replicate(), 2)}, None),
    "experts": ((4, 6, 5), {"ep": Shard(0), "etp": Shard(1)}, None),
    "experts along one dim": ((8, 5), {"ep": Shard(0), "etp": Shard(0)}, None),
}


def joined(rank, world_size, case):
    shape, mesh, stored = CASES[case]
    sizes = ({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 2}
             if "ep" in mesh else {"tensor_model_parallel_size": 4})  # fmt: skip
    parallel_state.initialize_model_parallel(**sizes)
    groups = parallel_state.get_process_groups()
    param = parameter(shape, init=Normal(1.0), groups=groups, mesh=mesh, stored=stored)
    fill_parameter(param, param.spec, "weight", 1, groups)
    shard = full_shard(param)
    full = gather_full(param.detach(), shard, groups)
    repeated = take_shard(full, shard, groups)
    parallel_state.destroy_model_parallel()
    return full, bool(torch.equal(repeated, param))


@pytest.mark.parametrize("case", CASES)
def test_shards_are_joined_and_taken_again(gloo_pool, case):
    (expected, _) = joined_alone(case)
    for full, same in gloo_pool.run(joined, 4, case):
        assert torch.equal(full, expected) and same


def joined_alone(case):
    shape, _, _ = CASES[case]
    param = parameter(shape, init=Normal(1.0), groups=SINGLE_PROCESS)
    fill_parameter(param, param.spec, "weight", 1, SINGLE_PROCESS)
    return param.detach(), True


def test_a_part_of_a_tensor_is_the_matrix_of_its_parameter():
    part = SubTensor((6, 4), "weight", Rectangle((2, 0), (4, 4)))
    param = parameter(part, init=Normal(1.0), groups=SINGLE_PROCESS, mesh={"tp": Shard(0)})
    fill_parameter(param, param.spec, "weight", 1, SINGLE_PROCESS)
    full = gather_full(param.detach(), full_shard(param), SINGLE_PROCESS)
    assert torch.equal(full, param) and torch.equal(take_shard(full, full_shard(param), SINGLE_PROCESS), param)


def test_a_cut_matrix_is_not_joined():
    param = torch.nn.Parameter(torch.zeros(4, 4))
    shard = ParameterShard(param, 0, 8, param.detach().view(-1)[:8], lambda: None, param.dtype)
    with pytest.raises(AssertionError, match="cut between ranks"):
        gather_full(shard.values, shard, SINGLE_PROCESS)
