"""Transfers over memory that processes share: the protocol is that of GPUs, only that everything happens at once; and
on GPUs."""

import ctypes

import pytest
import torch
import torch.distributed as dist

from megatron.core.fusions.sum_parts import sum_all
from megatron.core.groups.copy_engines import stream_queue
from megatron.core.groups.copy_engines.choice import engines_of
from megatron.core.groups.copy_engines.exchange import CopyEngines
from megatron.core.groups.copy_engines.mailbox import Mailbox
from tests.test_utils.shared_window import SharedWindow

ROUNDS = 7  # more than there are slots


def on_gpus():
    return dist.get_backend() == "nccl"


def engines_of_world(rank, size):
    if on_gpus():
        engines = engines_of("world", dist.group.WORLD, range(size), rank)
        assert engines is not None
        return engines
    return CopyEngines(rank, size, lambda num_bytes, words: SharedWindow(dist.group.WORLD, num_bytes, words))


def of(rank, number, shape):
    device = "cuda" if on_gpus() else "cpu"
    values = torch.full(shape, 100.0 * rank + number, dtype=torch.float64, device=device)
    return values + torch.arange(shape[-1], device=device)


def gather(rank, size):
    engines = engines_of_world(rank, size)
    for number in range(ROUNDS):
        rows = 2 if number < 4 else 5  # a larger message needs a larger window
        whole = engines.all_gather(of(rank, number, (rows, 3))).wait()
        torch.testing.assert_close(whole, torch.cat([of(peer, number, (rows, 3)) for peer in range(size)]))


def exchange(rank, size):
    engines = engines_of_world(rank, size)
    for number in range(ROUNDS):
        rows = 2 if number < 4 else 5
        parts = [of(10 * rank + target, number, (rows, 3)) for target in range(size)]
        first, second = engines.exchange(parts, torch.stack), engines.exchange(parts, sum_all)
        came = torch.stack([of(10 * peer + rank, number, (rows, 3)) for peer in range(size)])
        torch.testing.assert_close(first.wait(), came)
        torch.testing.assert_close(second.wait(), came.sum(0))


def mail(rank, size):
    box = engines_of_world(rank, size).mailbox(8 * 6)
    following, previous = (rank + 1) % size, (rank - 1) % size
    for number in range(ROUNDS):
        box.send(following, of(rank, number, (2, 3)))
        box.send(previous, of(rank, number + 50, (2, 3)))
        up, down = torch.empty_like(of(0, 0, (2, 3))), torch.empty_like(of(0, 0, (2, 3)))
        if size == 2:  # both come from the same rank, in its order
            box.receive(previous, up)
            box.receive(previous, down)
        else:
            box.receive(following, down)
            box.receive(previous, up)
        torch.testing.assert_close(up, of(previous, number, (2, 3)))
        torch.testing.assert_close(down, of(following, number + 50, (2, 3)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("task", [gather, exchange, mail], ids=lambda task: task.__name__)
def test_transfers(gloo_pool, task, size):
    gloo_pool.run(task, size)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("task", [gather, exchange, mail], ids=lambda task: task.__name__)
def test_transfers_between_gpus(nccl_pool, task, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    nccl_pool.run(task, size)


def test_messages_of_another_size_are_refused():
    class Nowhere:
        def beside(self):
            return self

        def wait(self, addresses, value):
            pass

        def word(self, rank, number):
            return 0

        address = copy = word

    box = Mailbox(0, 2, 48, lambda num_bytes, words: Nowhere())
    with pytest.raises(ValueError, match="a message of 8 bytes; this mailbox is for 48"):
        box.send(1, torch.empty(1, dtype=torch.float64))


class Driver:
    """Notes what it is asked for, in the fields of CUDA's interface."""

    def __init__(self, code=0):
        self.code, self.calls = code, []

    def cuMemcpyAsync(self, *arguments):
        self.calls.append(("copy", *arguments))
        return self.code

    def cuStreamBatchMemOp_v2(self, stream, count, operations, flags):
        words = (ctypes.c_uint64 * 6 * count).from_buffer(operations)
        self.calls.append((stream, flags, *[(w[0] & 0xFFFFFFFF, w[1], w[2], w[3] & 0xFFFFFFFF) for w in words]))
        return self.code


def test_operations_as_the_driver_takes_them(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(stream_queue, "_driver", lambda: driver)
    queue = stream_queue.StreamQueue(7)
    queue.copy(1000, 2000, 64)
    queue.wait([16, 32], 2**32 + 5)
    queue.write([48], 6)
    assert driver.calls == [("copy", 1000, 2000, 64, 7), (7, 0, (1, 16, 5, 0), (1, 32, 5, 0)), (7, 0, (2, 48, 6, 0))]


def test_a_driver_that_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(stream_queue, "_driver", lambda: Driver(801))
    with pytest.raises(RuntimeError, match="CUDA error 801"):
        stream_queue.StreamQueue(0).copy(0, 0, 1)
