"""Sums of losses by name, over micro-batches, data-parallel ranks and from the last stage; counts before and after."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.pipeline_parallel.results import MicroBatchResult
from megatron.training.observe.loss_sums import LossSums, global_counts


def sums_of(rank):
    """Two micro-batches of different lengths, in which every number is another."""
    results = [
        MicroBatchResult({"lm loss": torch.tensor([10.0 * tokens, tokens]), "aux": torch.tensor([7.0 + rank, 1.0])})
        for tokens in (3, 5)
    ]
    return LossSums(torch.device("cpu")).add(results)


def numbers(sums):
    return {name: pair.tolist() for name, pair in sums.pairs.items()}


def test_micro_batches_add_up_and_means_are_taken_once():
    sums = sums_of(0)
    assert numbers(sums) == {"lm loss": [80, 8], "aux": [14, 2]} and sums.count() == 10
    assert {name: mean.item() for name, mean in sums.means().items()} == {"lm loss": 10, "aux": 7}


def test_one_rank_has_nobody_to_ask():
    """A group of one has the handle None, which torch would take for the world group."""
    sums = sums_of(0).all_reduce(SINGLE_PROCESS.dp_cp).share(SINGLE_PROCESS.pp)
    assert numbers(sums) == numbers(sums_of(0))


def reduced(rank, world):
    parallel_state.initialize_model_parallel()
    return numbers(sums_of(rank).all_reduce(parallel_state.get_process_groups().dp_cp))


def test_data_parallel_ranks_add_up(gloo_pool):
    assert gloo_pool.run(reduced, 2) == [{"lm loss": [160, 16], "aux": [30, 4]}] * 2


def shared(rank, world):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    group = parallel_state.get_process_groups().pp
    empty = LossSums(torch.device("cpu"))
    first = (sums_of(1) if group.is_last else empty).share(group)
    repeated = (sums_of(1) if group.is_last else LossSums(torch.device("cpu"))).share(group, ["lm loss", "aux"])
    return numbers(first), numbers(repeated)


def test_the_last_stage_tells_the_others(gloo_pool):
    for first, repeated in gloo_pool.run(shared, 2):
        assert first == repeated == {"lm loss": [80, 8], "aux": [16, 2]}


def counted(rank, world, cp):
    groups = parallel_state.initialize_model_parallel(context_parallel_size=cp)
    counts = torch.tensor([3.0 + groups.dp.rank, 1.0], dtype=torch.float64)
    return global_counts(counts, groups, torch.device("cpu")).tolist()


def test_global_counts_are_equal_for_all_context_parallel_sizes(gloo_pool):
    for cp in (1, 2, 4):
        expected = [[[18.0, 4.0], [7.0, 2.0], [3.0, 1.0]][cp // 2]] * 4
        assert gloo_pool.run(counted, 4, cp) == expected


def test_losses_over_other_tokens_than_were_counted_are_rejected():
    sums = sums_of(0)
    sums.check_counts({"lm loss": torch.tensor(8.0)})
    with pytest.raises(UserError, match="'lm loss' over 8 tokens .* counted 9; return"):
        sums.check_counts({"lm loss": torch.tensor(9.0)})
    with pytest.raises(UserError, match="'sop loss' over no tokens"):
        sums.check_counts({"sop loss": torch.tensor(8.0)})


def test_losses_and_tokens_are_added_up_in_float64():
    """A sum of a billion and losses of 1: in float32 the later micro-batches would be rounded away."""
    sums = LossSums(torch.device("cpu"))
    for loss, tokens in ((2.0**30, 2**24), (1.0, 1), (1.0, 1)):
        pair = torch.tensor([loss, tokens], dtype=torch.float64)
        sums.add([MicroBatchResult({"lm loss": pair})])
    assert numbers(sums) == {"lm loss": [2**30 + 2, 2**24 + 2]}
