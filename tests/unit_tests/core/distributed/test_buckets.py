"""Collectives of one bucket: the elements that they send, and the order of their waits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.distributed.param_and_grad_buffer import Bucket, BufferKind, BufferLayout, ParamAndGradBuffer
from megatron.core.groups.process_groups import Group
from tests.test_utils.block_storage import Blocks

RANKS, REPLICAS = Group("dp_cp", (0, 1), 1), Group("dp_cp_replica", (1, 3), 0)


@pytest.fixture
def calls(monkeypatch):
    """Collectives with their elements, and waits, in order; nothing is sent."""
    results = []

    def collective(name, tensor):
        results.append((name, tensor.numel()))
        return SimpleNamespace(wait=lambda: results.append(("wait", name)))

    monkeypatch.setattr(buffers, "all_reduce", lambda tensor, group: collective("all-reduce", tensor))
    monkeypatch.setattr(buffers, "all_gather", lambda output, *args, **kwargs: collective("all-gather", output))
    return results


def test_instances_sum_only_the_shard_of_this_rank(calls):
    def reduce(tensor, group):
        return buffers.all_reduce(tensor, group)

    bucket = Bucket(torch.zeros(256), None, {}, BufferLayout(RANKS, reduce, sharded=True, replicas=REPLICAS))
    bucket.start_sum()
    bucket.sum_replicas()
    bucket.wait()
    assert calls == [("all-reduce", 256), ("wait", "all-reduce"), ("all-reduce", 128), ("wait", "all-reduce")]


@pytest.mark.parametrize("storage, sent", [(None, 256), (Blocks, 2 * 132)])
def test_a_gather_waits_for_the_one_before_and_is_finished_once(calls, monkeypatch, storage, sent):
    installed = []
    monkeypatch.setattr(Blocks, "install", classmethod(lambda cls, payload, weight: installed.append(weight.numel())))
    bucket = Bucket(torch.zeros(256), torch.zeros(256), {}, BufferLayout(RANKS, sharded=True, storage=storage))
    bucket.start_gather()
    bucket.start_gather()
    for _ in range(2):
        bucket.finish_gather()
    gather = [("all-gather", sent), ("wait", "all-gather")]
    assert calls == gather * 2 and installed == ([] if storage is None else [256] * 2)


def test_one_parameter_with_several_gradients_defers_its_bucket():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    places = dict(zip(parameters, (slice(0, 2), slice(2, 4))))
    assert not Bucket(torch.zeros(64), None, places, BufferLayout(RANKS)).is_last
    parameters[1].has_several_gradients = True
    assert Bucket(torch.zeros(64), None, places, BufferLayout(RANKS)).is_last


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_without_elements_are_left_out(rank):
    """Two parameters, each as large as a shard; buffers reverse their order."""
    parameters = [nn.Parameter(torch.zeros(64)) for _ in range(2)]
    layout = BufferLayout(Group("dp_cp", (0, 1), rank), sharded=True)
    buffer = ParamAndGradBuffer(parameters, BufferKind(torch.float32, torch.float32, None, False), layout)
    (shard,) = buffer.buckets[0].shards
    assert shard.parameter is parameters[1 - rank] and (shard.start, shard.stop) == (0, 64)
