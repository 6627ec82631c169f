"""Rank grids, process groups and the getters that programs use."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import mpu, parallel_state
from megatron.core.groups.process_groups import RankGrid, build_process_groups


def test_dense_groups_of_the_documented_example():
    grid = RankGrid(tp=2, pp=4, dp=2)  # 16 ranks, tp fastest, pp slowest
    assert grid.rank_lists("tp") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert grid.rank_lists("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert grid.rank_lists("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert grid.embedding_rank_lists()[:3] == [[0, 12], [4], [8]]


def test_the_pp_before_dp_order():
    grid = RankGrid(tp=2, pp=2, dp=2, order="tp-cp-ep-pp-dp")
    assert grid.rank_lists("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.rank_lists("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_context_groups_lie_between_tensor_and_data():
    grid = RankGrid(tp=2, cp=2, dp=2)
    assert grid.rank_lists("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.rank_lists("dp-cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid.rank_lists("tp-cp") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_expert_groups_are_taken_from_all_but_the_pipeline():
    grid = RankGrid(tp=2, dp=4, pp=2, ep=4, etp=1)
    assert grid.expert_rank_lists("ep") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert grid.expert_rank_lists("dp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert grid.edp == 2 and grid.expert_rank_lists("pp") == grid.rank_lists("pp")


@pytest.mark.parametrize(
    "grid", [RankGrid(tp=2, cp=2, dp=3, pp=2, ep=3), RankGrid(tp=4, dp=2, ep=2, etp=2), RankGrid(dp=5), RankGrid()]
)
def test_every_field_partitions_the_world_and_each_rank_knows_its_place(grid):
    for name, lists in grid.all_rank_lists().items():
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(grid.world_size)), name
    built = []
    for rank in range(grid.world_size):
        groups = build_process_groups(grid, rank, lambda name, lists: built.append(name) or (name, None))
        assert groups.tp.ranks[groups.tp.rank] == rank == groups.edp.ranks[groups.edp.rank]
        assert (groups.tp.size, groups.cp.size, groups.dp.size, groups.pp.size) == (grid.tp, grid.cp, grid.dp, grid.pp)
        assert (groups.ep.size, groups.etp.size, groups.edp.size) == (grid.ep, grid.expert_tp, grid.edp)
        assert all((group.handle is None) == (group.size == 1) for group in vars(groups).values())


def test_equal_ranks_share_a_communicator_that_messages_between_stages_do_not_use():
    built = []
    groups = build_process_groups(RankGrid(pp=2, dp=2), 0, lambda name, lists: built.append(name) or (name, None))
    assert len({groups.pp.handle, groups.pp_up.handle, groups.pp_down.handle}) == 3
    assert groups.dp.handle == groups.dp_cp.handle == groups.edp.handle and len(built) == len(set(built))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RankGrid.from_world(6, tp=4), "not divisible by tensor-model-parallel 4"),
        (lambda: RankGrid(tp=0), "at least 1"),
        (lambda: RankGrid(dp=3, ep=2), "expert grid"),
        (lambda: RankGrid(order="tp-tp-dp"), "must list axes of 'tp-cp-ep-dp-pp', each once"),
        (lambda: RankGrid(order="tp-xp"), "must list axes"),
        (lambda: RankGrid(order="tp-dp", pp=2, cp=3), "must list cp of size 3, pp of size 2"),
    ],
)
def test_impossible_grids_say_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_one_process_is_a_group_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    parallel_state.initialize_model_parallel()
    try:
        total = torch.ones(1)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        assert (dist.get_rank(), dist.get_world_size(), total.item()) == (0, 1, 1.0)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_one_process_needs_no_distributed(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    parallel_state.initialize_model_parallel(group_of_one=False)
    try:
        assert parallel_state.model_parallel_is_initialized() and not dist.is_initialized()
        assert parallel_state.get_tensor_model_parallel_world_size() == 1 == mpu.get_data_parallel_world_size()
        assert parallel_state.is_pipeline_first_stage() and parallel_state.is_pipeline_last_stage()
        with pytest.raises(RuntimeError, match="already initialised"):
            parallel_state.initialize_model_parallel()
    finally:
        parallel_state.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(RuntimeError, match="not initialised"):
        parallel_state.get_tensor_model_parallel_rank()


GROUP_GETTERS = sorted(
    name for name in vars(parallel_state) if name.startswith("get_") and name.endswith(("_group", "_gloo"))
)


def test_getters_of_a_process_without_peers_give_groups_that_collectives_take(monkeypatch):
    """Also after the start of the training program, which needs no torch.distributed until a getter is called."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    parallel_state.initialize_model_parallel(group_of_one=False)
    try:
        assert not dist.is_initialized() and len(GROUP_GETTERS) >= 16
        for name in GROUP_GETTERS:
            group = getattr(parallel_state, name)()
            assert (dist.get_process_group_ranks(group), group.size(), group.rank()) == ([0], 1, 0), name
            value = torch.ones(2)
            dist.broadcast(value, src=dist.get_global_rank(group, 0), group=group)
            received = torch.zeros(2)
            dist.scatter(received, [value], src=0, group=group)
            gathered = [torch.zeros(2)]
            dist.all_gather(gathered, received, group=group)
            assert gathered[0].tolist() == [1, 1], name
        levels = parallel_state.get_hierarchical_context_parallel_groups()
        assert [dist.get_world_size(group) for group in levels] == [1, 1]
        assert parallel_state.get_data_parallel_group(True, partial_data_parallel=True).size() == 1
        assert parallel_state.get_amax_reduction_group(True, tp_only_amax_red=True).size() == 1
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    for name in GROUP_GETTERS:
        with pytest.raises(RuntimeError, match="not initialised"):
            getattr(parallel_state, name)()
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None


def _all_ranks_of_getters(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    state = parallel_state
    ranks = {name: dist.get_process_group_ranks(getattr(state, name)()) for name in GROUP_GETTERS}
    ranks["tensor and data"] = dist.get_process_group_ranks(state.get_tensor_and_data_parallel_group())
    assert state.get_tensor_and_data_parallel_group() is state.get_amax_reduction_group()  # made once
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=state.get_tensor_and_data_parallel_group())
    stages = [state.get_pipeline_model_parallel_first_rank(), state.get_pipeline_model_parallel_last_rank(),
              state.get_pipeline_model_parallel_prev_rank(), state.get_pipeline_model_parallel_next_rank()]  # fmt: skip
    return ranks, total.item(), stages, state.is_rank_in_embedding_group()


def test_getters_name_the_ranks_of_each_axis(gloo_pool):
    ranks, total, stages, embeds = gloo_pool.run(_all_ranks_of_getters, 8)[5]
    named = {
        "tensor_model_parallel": [4, 5], "data_parallel": [5, 7], "pipeline_model_parallel": [1, 5],
        "model_parallel": [0, 1, 4, 5], "tensor_and_data_parallel": [4, 5, 6, 7], "amax_reduction": [4, 5, 6, 7],
        "embedding": [1, 5], "position_embedding": [5], "context_parallel": [5], "expert_data_parallel": [5, 7],
        "expert_model_parallel": [5], "expert_tensor_and_model_parallel": [4, 5],
        "expert_tensor_model_pipeline_parallel": [0, 1, 4, 5], "tensor_and_context_parallel": [4, 5],
        "expert_tensor_parallel": [4, 5],
    }  # fmt: skip
    assert {name: ranks[f"get_{name}_group"] for name in named} == named
    assert ranks["get_data_parallel_group_gloo"] == [5, 7]
    assert (total, stages, embeds) == (22.0, [1, 5, 1, 1], True)


def _getters_of_a_real_world(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    try:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        single = torch.tensor([float(rank)])
        dist.all_reduce(single, group=parallel_state.get_pipeline_model_parallel_group())
        return (
            parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank(), total.item(),
            single.item(), parallel_state.get_tensor_model_parallel_src_rank(),
        )  # fmt: skip
    finally:
        parallel_state.destroy_model_parallel()


def test_getters_and_handles_in_a_world_of_four(gloo_pool):
    assert gloo_pool.run(_getters_of_a_real_world, 4) == [
        (0, 0, 2, 0, 0),
        (1, 0, 4, 1, 0),
        (0, 1, 2, 2, 2),
        (1, 1, 4, 3, 2),
    ]


@pytest.mark.parametrize("order, full", [("tp-dp-pp", "tp-dp-pp-cp-ep"), ("tp-pp-dp", "tp-pp-dp-cp-ep"),
                                         ("TP-CP-EP-DP-PP", "tp-cp-ep-dp-pp")])  # fmt: skip
def test_axes_of_size_one_may_be_left_out_of_an_order(order, full):
    short, long = (RankGrid.from_world(8, tp=2, pp=2, order=name) for name in (order, full))
    for axis in ("tp", "pp", "dp", "cp"):
        assert short.sizes == long.sizes and short._rank_lists(short.sizes, axis) == long._rank_lists(long.sizes, axis)


def test_model_chunks_without_a_pipeline_are_rejected():
    with pytest.raises(
        ValueError, match="virtual_pipeline_model_parallel_size 2: requires pipeline_model_parallel_siz"
    ):
        parallel_state.initialize_model_parallel(1, 1, 2)
    assert not parallel_state.model_parallel_is_initialized()
