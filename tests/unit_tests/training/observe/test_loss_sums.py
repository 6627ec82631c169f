"""Sums of losses: tokens and pairs of every name, over micro-batches, data-parallel ranks and from the last stage."""

import torch

from megatron.core import parallel_state
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.pipeline_parallel.results import MicroBatchResult
from megatron.training.observe.loss_sums import LossSums


def sums_of(rank):
    """Two micro-batches of different lengths, in which every number is another."""
    results = [
        MicroBatchResult(torch.tensor(tokens + rank), {
            "lm loss": torch.tensor([10.0 * tokens, tokens]), "aux": torch.tensor([7.0 + rank, 1.0]),
        })
        for tokens in (3, 5)
    ]  # fmt: skip
    return LossSums(torch.device("cpu")).add(results)


def numbers(sums):
    return sums.num_tokens.item(), {name: pair.tolist() for name, pair in sums.pairs.items()}


def test_micro_batches_add_up_and_means_are_taken_once():
    sums = sums_of(0)
    assert numbers(sums) == (8, {"lm loss": [80, 8], "aux": [14, 2]})
    assert {name: mean.item() for name, mean in sums.means().items()} == {"lm loss": 10, "aux": 7}


def test_one_rank_has_nobody_to_ask():
    """A group of one has the handle None, which torch would take for the world group."""
    sums = sums_of(0).all_reduce(SINGLE_PROCESS.dp_cp).share(SINGLE_PROCESS.pp)
    assert numbers(sums) == numbers(sums_of(0))


def reduced(rank, world):
    parallel_state.initialize_model_parallel()
    return numbers(sums_of(rank).all_reduce(parallel_state.get_process_groups().dp_cp))


def test_data_parallel_ranks_add_up(gloo_pool):
    assert gloo_pool.run(reduced, 2) == [(18, {"lm loss": [160, 16], "aux": [30, 4]})] * 2


def shared(rank, world):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    group = parallel_state.get_process_groups().pp
    empty = LossSums(torch.device("cpu"))
    first = (sums_of(1) if group.is_last else empty).share(group)
    again = (sums_of(1) if group.is_last else LossSums(torch.device("cpu"))).share(group, ["lm loss", "aux"])
    return numbers(first), numbers(again)


def test_the_last_stage_tells_the_others(gloo_pool):
    for first, again in gloo_pool.run(shared, 2):
        assert first == again == (10, {"lm loss": [80, 8], "aux": [16, 2]})


def test_losses_and_tokens_are_added_up_in_float64():
    """A sum of a billion and losses of 1: in float32 the later micro-batches would be rounded away."""
    sums = LossSums(torch.device("cpu"))
    for loss, tokens in ((2.0**30, 2**24), (1.0, 1), (1.0, 1)):
        pair = torch.tensor([loss, tokens], dtype=torch.float64)
        sums.add([MicroBatchResult(torch.tensor(tokens), {"lm loss": pair})])
    assert numbers(sums) == (2**24 + 2, {"lm loss": [2**30 + 2, 2**24 + 2]})
