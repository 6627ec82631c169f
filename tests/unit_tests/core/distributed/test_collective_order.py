"""Order of collectives and updates: equal on all ranks, and no weight is written while it is gathered."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

WIDTH = 4


class Net(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.weights = nn.ParameterList([torch.full((WIDTH,), 1.0 + index) for index in range(count)])


def wrapped(**options):
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=1, **options)
    ddp = DistributedDataParallel(None, config, Net(), groups=SINGLE_PROCESS)
    assert len(ddp.grad_buffers) == 1 and len(ddp.grad_buffers[0].buckets) == 3
    return ddp


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1)])
def test_reductions_start_in_bucket_order_for_all_orders_of_gradients(monkeypatch, order):
    """Ranks whose gradients are ready in different orders must start the same collectives one after another."""
    started = []
    start_sum = Bucket.start_sum

    def noted(self):
        started.append(self)
        start_sum(self)

    monkeypatch.setattr(Bucket, "start_sum", noted)
    ddp = wrapped(overlap_grad_reduce=True)
    buffer, weights = ddp.grad_buffers[0], list(ddp.module.parameters())
    ddp.zero_grad_buffer()
    for finished, index in enumerate(order, 1):
        weights[index].square().sum().backward()
        ready = {id(buffer.buckets_by_parameter[weights[item]]) for item in order[:finished]}
        first_waiting = next((n for n, bucket in enumerate(buffer.buckets) if id(bucket) not in ready), 3)
        assert started == buffer.buckets[:first_waiting], finished
    ddp.finish_grad_sync()
    assert started == buffer.buckets


class Gather:
    """An all-gather in flight that ends when it is waited for."""

    def __init__(self, events):
        self.events = events

    def wait(self):
        self.events.append("waited")


def test_updates_wait_for_the_gathers_of_the_step_before():
    """No forward pass lies between the two: nothing else has waited."""
    ddp = wrapped(use_distributed_optimizer=True)
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, [ddp], groups=SINGLE_PROCESS)
    events = []
    for bucket in ddp.grad_buffers[0].buckets:
        bucket._gather = Gather(events)
    optimizer.parts[0].rule.update = lambda *args: events.append("updated")
    optimizer.step()
    assert events == ["waited"] * 3 + ["updated"]


def test_a_gather_waits_for_the_gather_that_writes_the_same_weights(monkeypatch):
    events = []
    monkeypatch.setattr(
        "megatron.core.distributed.param_and_grad_buffer.all_gather",
        lambda *args, **kwargs: [events.append("started"), Gather(events)][1],
    )
    ddp = wrapped(use_distributed_optimizer=True)
    bucket = ddp.grad_buffers[0].buckets[0]
    bucket.layout = replace(bucket.layout, group=Group("dp", (0, 1), 0))
    bucket.start_gather()
    bucket.start_gather()
    bucket.finish_gather()
    bucket.finish_gather()
    assert events == ["started", "waited", "started", "waited"]
