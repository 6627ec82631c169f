"""Groups of two levels, slices of batches, and layouts that are rejected before a run starts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.compat.training_utils import get_batch_on_this_cp_rank
from megatron.core import parallel_state
from megatron.core.attention.context import AttentionContext
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.context_parallel.forms import kernel_needs, layer_comm_type
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group, RankGrid
from megatron.core.models.registry import get_family
from megatron.training.tasks.gpt import GPTTask
from tests.test_utils.training_steps import build


def two_levels(rank, size):
    groups = parallel_state.initialize_model_parallel(
        context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2]
    )
    handles = parallel_state.get_hierarchical_context_parallel_groups()
    sums = [torch.tensor([rank]) for _ in handles]
    for value, handle in zip(sums, handles):
        torch.distributed.all_reduce(value, group=handle)
    return groups.cp_a2a.ranks, groups.cp_p2p.ranks, [value.item() for value in sums]


def test_heads_are_exchanged_among_neighbours_and_rings_go_outside(gloo_pool):
    result = gloo_pool.run(two_levels, 4)
    assert [inner for inner, _, _ in result] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [outer for _, outer, _ in result] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [sums for _, _, sums in result] == [[1, 2], [1, 4], [5, 2], [5, 4]]


def test_levels_stay_inside_of_context_groups():
    grid = RankGrid.from_world(16, tp=2, cp=4, cp_levels=(2, 2))
    for outer in (grid.all_rank_lists()["cp_a2a"], grid.all_rank_lists()["cp_p2p"]):
        assert sorted(sum(outer, [])) == list(range(16)) and {len(ranks) for ranks in outer} == {2}
        assert all(any(set(ranks) <= set(cp) for cp in grid.rank_lists("cp")) for ranks in outer)
    assert grid.all_rank_lists()["cp_a2a"][0] == [0, 2] and grid.all_rank_lists()["cp_p2p"][0] == [0, 4]


def sliced(rank, size):
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    tokens = torch.arange(3 * 16).view(3, 16)
    batch = {"tokens": tokens, "loss_mask": tokens / 48, "sample_index": torch.arange(3), "attention_mask": None,
             "cu_seqlens": torch.tensor([0, 16, 32, 48])}  # fmt: skip
    part = get_batch_on_this_cp_rank(batch)
    with pytest.raises(ValueError, match="attention_mask: --context-parallel-size 2 takes no dense masks"):
        get_batch_on_this_cp_rank({**batch, "attention_mask": torch.ones(3, 1, 16, 16)})
    for name in ("sample_index", "cu_seqlens", "attention_mask"):
        assert part[name] is batch[name]
    return part["tokens"], part["loss_mask"]


def sliced_with_images(rank, size):
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    tokens = torch.arange(32).view(2, 16)
    batch = {"tokens": tokens, "images": torch.rand(2, 4, 3, 16, 16), "weight": tokens * 2.0, "boxes": torch.rand(2, 4)}
    with pytest.raises(UserError) as error:
        get_batch_on_this_cp_rank(batch)
    part = get_batch_on_this_cp_rank(batch, sequence_keys=("weight",), whole_keys=["images", "boxes"])
    assert part["images"] is batch["images"] and part["boxes"] is batch["boxes"]
    assert torch.equal(part["weight"], part["tokens"] * 2.0) and part["tokens"].shape == (2, 8)
    assert get_batch_on_this_cp_rank({"tokens": tokens}, whole_keys=["tokens"])["tokens"] is tokens
    single = dist.new_group([rank], use_local_synchronization=True)
    assert get_batch_on_this_cp_rank(batch, single) is batch
    same = get_batch_on_this_cp_rank({"tokens": tokens}, cp_group=dist.group.WORLD)
    assert torch.equal(same["tokens"], part["tokens"])
    return str(error.value)


def test_only_named_tensors_are_split_and_unknown_ones_are_rejected(gloo_pool):
    for message in gloo_pool.run(sliced_with_images, 2):
        names = "batch: images [2, 4, 3, 16, 16], weight [2, 16], boxes [2, 4]: --context-parallel-size 2 splits"
        assert message.startswith(names)


def sliced_by_task(rank, size):
    """Return the slices of a batch of a task with custom tensors."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)

    class Weighted(GPTTask):
        sequence_keys, whole_keys = ("weights",), ("pictures",)

    task = object.__new__(Weighted)
    task.preferences, task.stored_logits = PreferenceConfig(), None
    task.cfg = SimpleNamespace(
        family=get_family("gpt"),
        variable_lengths=SimpleNamespace(use_varlen_dataset=False),
        group=lambda kind: SimpleNamespace(sft=False),
    )
    numbers = torch.arange(16).view(1, 16)
    batch = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "weights", "pictures"), numbers)
    return {
        name: value.shape[1]
        for name, value in task.get_batch(iter([batch])).items()
        if value is not None and value.dim() > 1
    }


def test_a_task_names_the_tensors_of_its_data(gloo_pool):
    for shapes in gloo_pool.run(sliced_by_task, 2):
        assert shapes.pop("pictures") == 16 and set(shapes.values()) == {8} and "weights" in shapes


def test_batches_are_sliced_by_token_except_values_per_sample(gloo_pool):
    parts = gloo_pool.run(sliced, 2)
    assert parts[0][0][0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert torch.equal(zigzag.merge_parts([tokens for tokens, _ in parts]), torch.arange(48).view(3, 16))
    assert torch.equal(zigzag.merge_parts([mask for _, mask in parts]), torch.arange(48).view(3, 16) / 48)


def make_config(**overrides):
    sizes = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "attention_dropout": 0.0}
    return TransformerConfig(**{**sizes, **overrides})


def refusals(rank, size):
    groups = parallel_state.initialize_model_parallel(context_parallel_size=size)
    with pytest.raises(ValueError, match="num_query_groups 1: cp_comm_type a2a gives 2 ranks"):
        one_group = make_config(context_parallel_size=2, num_query_groups=1, cp_comm_type=["a2a"])
        CoreAttention(one_group, 1, groups=groups)
    with pytest.raises(ValueError, match="hierarchical_context_parallel_sizes"):
        CoreAttention(make_config(context_parallel_size=2, cp_comm_type=["a2a+p2p"]), 1, groups=groups)
    with pytest.raises(ValueError, match="context_parallel_size 1: the process groups have 2 ranks"):
        CoreAttention(make_config(), 1, groups=groups)
    core = CoreAttention(make_config(context_parallel_size=2), 1, groups=groups)
    query, layout = torch.zeros(4, 1, 4, 6), TokenLayout.of(groups)
    with pytest.raises(ValueError, match="attention_mask"):
        core(query, query, query, AttentionContext(layout, torch.zeros(4, 4, dtype=torch.bool)))
    with pytest.raises(ValueError, match="attention over 2 context-parallel ranks needs ctx.layout"):
        core(query, query, query)
    dropping = CoreAttention(make_config(context_parallel_size=2, attention_dropout=0.1), 1, groups=groups)
    with pytest.raises(ValueError, match="coordinates"):
        dropping(query, query, query, AttentionContext(layout))


def test_context_parallel_form_rejects_unsupported_settings_at_construction(gloo_pool):
    gloo_pool.run(refusals, 2)


def test_sizes_of_two_levels_make_up_the_ranks():
    with pytest.raises(ValueError, match="give an inner and an outer size, whose product is context-parallel size 4"):
        RankGrid(cp=4, cp_levels=(2, 4))
    with pytest.raises(ValueError, match="give an inner and an outer size"):
        parallel_state.initialize_model_parallel(hierarchical_context_parallel_sizes=[4])


def test_a_list_of_forms_counts_layers_of_the_full_model():
    assert [layer_comm_type(["a2a", "p2p"], layer) for layer in (1, 2)] == ["a2a", "p2p"]
    assert layer_comm_type(["allgather"], 7) == layer_comm_type("allgather", 7) == "allgather"


@pytest.mark.parametrize(
    ("kind", "levels", "needs"),
    [("p2p", (), "ring"), ("allgather", (), "gather"), ("a2a", (), "whole"), ("a2a+p2p", (1, 2), "ring"),
     ("a2a+p2p", (2, 1), "whole")],
)  # fmt: skip
def test_only_rings_and_gathers_merge_blocks(kind, levels, needs):
    """Only such kernels must give log-sum-exps, and only rings with a window make bands that not all get right."""
    groups = {
        name: Group(name, ranks=tuple(range(size)), rank=0)
        for name, size in {"cp": 2, **dict(zip(("cp_a2a", "cp_p2p"), levels))}.items()
    }
    assert kernel_needs(kind, TokenLayout.of(replace(SINGLE_PROCESS, **groups)), sink=False) == needs
    assert kernel_needs(kind, TokenLayout(), sink=False) == "whole"


def losses_by_local_size(rank, size, packed):
    groups = parallel_state.initialize_model_parallel(hybrid_context_parallel=True)
    model = build(groups, {"position_embedding_type": "rope"}, hybrid_context_parallel=True, hidden_dropout=0.0,
                  attention_dropout=0.0, normalization="RMSNorm")  # fmt: skip
    tokens = torch.arange(16).view(1, 16) * 7 % 53
    bounds = torch.tensor([0, 6, 16], dtype=torch.int32) if packed else None
    result = {}
    for local_size in (1, 2, 4):
        documents = PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, local_cp_size=local_size)
        layout = model.micro_batch_layout(documents)
        part = layout.local(tokens, 1)
        losses = model(part, None, labels=part, packed_seq_params=documents)
        result[local_size] = layout.full(losses, 1).detach()
    with pytest.raises(UserError, match="local_cp_size 8: no groups of this size, only of .1, 2, 4."):
        model(tokens, None, labels=tokens, packed_seq_params=PackedSeqParams(local_cp_size=8))
    return result


@pytest.mark.parametrize("packed", [False, True])
def test_a_micro_batch_names_its_context_parallel_size(gloo_pool, packed):
    for result in gloo_pool.run(losses_by_local_size, 4, packed):
        for size in (2, 4):
            torch.testing.assert_close(result[size], result[1])
