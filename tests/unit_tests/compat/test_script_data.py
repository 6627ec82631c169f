"""Data sets and micro-batches of entry scripts: which rank reads them, and how the other ranks get them."""

import pytest
import torch

from megatron.compat.script_data import AbsentData, HostTensor, MicroBatches, ScriptData
from megatron.compat.training_utils import get_batch_on_this_tp_rank
from megatron.core import parallel_state
from megatron.core.config.errors import UserError


def batch(first):
    tokens = torch.arange(first, first + 8).view(2, 4)
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(2, 4), "position_ids": tokens * 0,
            "cu_seqlens": torch.tensor([0, 2, 4, 8], dtype=torch.int32)}  # fmt: skip


def _read_in_a_loop(rank, world_size):
    """A program with a custom loop: the second rank has no data, or data that must be ignored."""
    parallel_state.initialize_model_parallel(2)
    iterators = [iter([batch(0)]), iter([batch(100)])] if rank == 0 else [None, iter([batch(200)])]
    return [get_batch_on_this_tp_rank(iterator, mtp_on_this_rank=False) for iterator in iterators]


def test_first_tensor_parallel_rank_reads_for_its_group_outside_of_pretrain(gloo_pool):
    for actual in gloo_pool.run(_read_in_a_loop, 2):
        for item, first in zip(actual, (0, 100)):
            assert list(item) == ["tokens", "labels", "loss_mask", "attention_mask", "position_ids"]
            torch.testing.assert_close(item["tokens"], batch(first)["tokens"], rtol=0, atol=0)
            visible = ~item["attention_mask"][:, 0]
            assert visible.sum(dim=(1, 2)).tolist() == [6, 10]  # two documents of 2 tokens, one of 4


def _build(rank, world_size, retained):
    parallel_state.initialize_model_parallel(1, 2)
    try:
        result = ScriptData().build(lambda sizes: retained[rank], (4, 2, 2))
    except UserError as error:
        return str(error)
    return [None if item is None else (type(item), len(item)) for item in result]


def test_missing_data_sets_have_the_length_of_those_that_exist(gloo_pool):
    full, none = [range(4), range(2), None], [None, None, None]
    first, second = gloo_pool.run(_build, 2, [full, none])
    assert first == [(range, 4), (range, 2), None] and second == [(AbsentData, 4), (AbsentData, 2), None]
    assert gloo_pool.run(_build, 2, [none, none]) == [none, none]


def test_data_sets_that_no_rank_holds_together_are_rejected(gloo_pool):
    retained = [[range(4), range(2), None], [None, None, range(3)]]
    messages = gloo_pool.run(_build, 2, retained)
    assert all("rank 1 holds one that rank 0 does not" in message for message in messages)


def test_micro_batches_are_noted_and_stay_on_the_cpu():
    noted = []
    batches = MicroBatches(iter([batch(0), "anything"]), noted.append)
    tokens = next(batches)["tokens"]
    assert isinstance(tokens, HostTensor) and next(batches) == "anything" and len(noted) == 2
    assert type(tokens.cuda(non_blocking=True)) is torch.Tensor and type(tokens + 1) is torch.Tensor
    with pytest.raises(StopIteration):
        next(batches)
