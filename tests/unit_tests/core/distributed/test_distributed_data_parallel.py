"""Gradients on any number of ranks and micro-batches equal one rank with one batch."""

import gc
import weakref

import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    check_replicas,
    finalize_model_grads,
)
from megatron.core.distributed.replicas import tensor_hash
from megatron.core.groups.process_groups import SINGLE_PROCESS

SAMPLES, WIDTH = 12, 6


class Net(nn.Module):
    """Uses ``first`` twice and ``unused`` never, and its parameters not in their creation order."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(WIDTH, 1)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.first(torch.tanh(self.first(x))))).squeeze(-1)


def problem(dtype):
    torch.manual_seed(1)
    data = torch.randn(SAMPLES, WIDTH, dtype=torch.float64).to(dtype)
    mask = (torch.rand(SAMPLES, dtype=torch.float64) > 0.3).to(dtype)
    mask[4:6] = 0  # a micro-batch without any valid sample
    return Net().to(dtype), data, mask


def reference(dtype=torch.float64):
    net, data, mask = problem(dtype)
    ((net(data) ** 2 * mask).sum() / mask.sum()).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def wrapped(net, **options):
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options)
    return DistributedDataParallel(None, config, net)


def run_step(ddp, data, mask, rank, world, micro_batch):
    """One iteration over this rank's slice in micro-batches; the loss rule of the training loop."""
    per_rank = SAMPLES // world
    starts = range(rank * per_rank, (rank + 1) * per_rank, micro_batch)
    ddp.zero_grad_buffer()
    tokens = torch.zeros(())
    for start in starts:
        piece = slice(start, start + micro_batch)
        loss = (ddp(data[piece]) ** 2 * mask[piece]).sum()
        tokens += mask[piece].sum()
        if start == starts[-1]:
            loss.backward()
        else:
            with ddp.no_sync():
                loss.backward()
    return finalize_model_grads([ddp], tokens)


def gradients_on_ranks(rank, world, overlap, micro_batch):
    parallel_state.initialize_model_parallel()
    net, data, mask = problem(torch.float64)
    ddp = wrapped(net, overlap_grad_reduce=overlap, bucket_size=8)
    for _ in range(2):  # the second iteration must not remember the first
        total = run_step(ddp, data, mask, rank, world, micro_batch)
    assert not overlap or len(ddp.grad_buffers[0].buckets) > 1
    assert all(p.grad is None for p in net.parameters())
    return total.item(), {name: p.main_grad.numpy() for name, p in net.named_parameters()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_equal_those_of_one_rank(gloo_pool, world, overlap):
    expected = reference()
    for micro_batch in (1, 2, SAMPLES // world):
        for total, grads in gloo_pool.run(gradients_on_ranks, world, overlap, micro_batch):
            assert total == problem(torch.float64)[2].sum().item()
            assert not grads.pop("unused").any()
            for name, grad in grads.items():
                torch.testing.assert_close(torch.from_numpy(grad), expected[name], rtol=1e-12, atol=1e-14)


def alone(data, mask, piece):
    """bf16 gradients of one micro-batch, without the wrapper."""
    net = problem(torch.bfloat16)[0]
    (net(data[piece]) ** 2 * mask[piece]).sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def test_half_precision_accumulates_in_fp32():
    net, data, mask = problem(torch.bfloat16)
    ddp = wrapped(net)
    run_step(ddp, data, mask, 0, 1, 2)
    assert {p.main_grad.dtype for p in net.parameters()} == {torch.float32}
    expected = {name: torch.zeros_like(p.main_grad) for name, p in net.named_parameters()}
    for piece in torch.arange(SAMPLES).split(2):
        for name, grad in alone(data, mask, piece).items():
            expected[name] += grad
    for name, p in net.named_parameters():
        # sums of bf16 gradients would be off by 2^-9
        torch.testing.assert_close(p.main_grad, expected[name] / mask.sum().item(), rtol=1e-5, atol=1e-7)
    coarse = DistributedDataParallel(None, DistributedDataParallelConfig(), problem(torch.bfloat16)[0])
    assert coarse.grad_buffers[0].grad_data.dtype == torch.bfloat16


def test_a_gradient_written_by_a_fused_kernel_is_not_added_twice():
    net = problem(torch.float64)[0]
    ddp = wrapped(net)
    net.first.weight.grad_added_to_main_grad = True
    ddp(torch.ones(1, WIDTH, dtype=torch.float64)).sum().backward()
    assert not net.first.weight.main_grad.any() and net.first.weight.grad is None
    assert net.first.bias.main_grad.any()


def test_the_views_cover_the_buffer_and_names_stay():
    net = Net()
    ddp = wrapped(net, overlap_grad_reduce=True, bucket_size=10)
    for i, p in enumerate(net.parameters()):
        p.main_grad.fill_(i + 1)
    assert [int(p.main_grad.unique()) for p in net.parameters()] == [1, 2, 3, 4, 5]
    ddp.scale_gradients(torch.tensor(2.0))
    assert [int(p.main_grad.unique()) for p in net.parameters()] == [2, 4, 6, 8, 10]
    assert ddp.state_dict().keys() == Net().state_dict().keys()
    ddp.zero_grad_buffer()
    assert not any(p.main_grad.any() for p in net.parameters())


def started_by_backward(rank, world, overlap):
    parallel_state.initialize_model_parallel()
    ddp = wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), overlap_grad_reduce=overlap, bucket_size=4)
    ddp(torch.ones(1, 2)).sum().backward()
    started = [bucket.started for bucket in ddp.grad_buffers[0].buckets]
    ddp.finish_grad_sync()
    return started


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_backward_itself_starts_every_sum(gloo_pool, overlap):
    for started in gloo_pool.run(started_by_backward, 2, overlap):
        assert started == [overlap] * 4


def backward_after_reduction(rank, world):
    parallel_state.initialize_model_parallel()
    ddp = wrapped(nn.Linear(2, 2), overlap_grad_reduce=True)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()


def test_forgetting_no_sync_is_an_error_not_a_wrong_gradient(gloo_pool):
    with pytest.raises(AssertionError, match="no_sync"):
        gloo_pool.run(backward_after_reduction, 2)


def drifted(rank, world):
    parallel_state.initialize_model_parallel()
    net = problem(torch.float32)[0]
    groups = parallel_state.get_process_groups()
    assert check_replicas([net], groups) == []
    if rank == 1:
        with torch.no_grad():
            bits = net.first.weight.view(torch.int32)
            bits[2, 3] += 1  # one unit in the last place
    return [tuple(check_replica) for check_replica in check_replicas([net], groups)]


def test_a_replica_that_differs_in_one_bit_is_named(gloo_pool):
    assert gloo_pool.run(drifted, 3) == [[("first.weight", 1, "dp_cp")]] * 3
    assert check_replicas([Net()], SINGLE_PROCESS) == []


def test_a_hash_depends_on_every_bit_and_its_position():
    x = torch.arange(1.0, 9.0)
    swapped, changed = x.flip(0), x.clone()
    changed[5] = -changed[5]
    for size in (2, 5, 8):
        assert tensor_hash(x[:size]) == tensor_hash(x[:size].clone()) != tensor_hash(swapped[-size:])
    assert tensor_hash(x) != tensor_hash(changed) and tensor_hash(x) == tensor_hash(x.view(2, 4))


def test_a_model_that_nobody_holds_is_freed():
    """Its process groups are freed too; their threads would continue to poll."""
    net = nn.Linear(2, 2)
    ddp = wrapped(net, overlap_grad_reduce=True)
    ddp(torch.ones(1, 2)).sum().backward()
    left = [weakref.ref(x) for x in (net, ddp)]
    del net, ddp
    gc.collect()
    assert [item() for item in left] == [None, None]
