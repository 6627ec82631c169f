"""Transfers over shared memory of processes, with the GPU protocol but synchronous copies; and transfers on GPUs."""

import ctypes

import pytest
import torch
import torch.distributed as dist

from megatron.core.fusions.sum_parts import sum_all
from megatron.core.groups.copy_engines import stream_queue
from megatron.core.groups.copy_engines.choice import start_copy_engines
from megatron.core.groups.copy_engines.exchange import CopyEngines
from megatron.core.groups.copy_engines.mailbox import Mailbox
from tests.test_utils.shared_window import SharedWindow

ROUNDS = 7  # more than there are slots


def on_gpus():
    return dist.get_backend() == "nccl"


def engines_of_world(rank, size):
    if on_gpus():
        engines = start_copy_engines("world", dist.group.WORLD, range(size), rank)
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
        full = engines.all_gather(of(rank, number, (rows, 3))).wait()
        torch.testing.assert_close(full, torch.cat([of(peer, number, (rows, 3)) for peer in range(size)]))


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
    next_item, previous = (rank + 1) % size, (rank - 1) % size
    for number in range(ROUNDS):
        box.send(next_item, of(rank, number, (2, 3)))
        box.send(previous, of(rank, number + 50, (2, 3)))
        up, down = torch.empty_like(of(0, 0, (2, 3))), torch.empty_like(of(0, 0, (2, 3)))
        if size == 2:  # both come from the same rank, in its order
            box.receive(previous, up)
            box.receive(previous, down)
        else:
            box.receive(next_item, down)
            box.receive(previous, up)
        torch.testing.assert_close(up, of(previous, number, (2, 3)))
        torch.testing.assert_close(down, of(next_item, number + 50, (2, 3)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("task", [gather, exchange, mail], ids=lambda task: task.__name__)
def test_transfers(gloo_pool, task, size):
    gloo_pool.run(task, size)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.gpus(size)) for size in (2, 4)])
@pytest.mark.parametrize("task", [gather, exchange, mail], ids=lambda task: task.__name__)
def test_transfers_between_gpus(nccl_pool, task, size):
    nccl_pool.run(task, size)


def test_messages_of_another_size_are_rejected():
    class Nowhere:
        def side_queue(self):
            return self

        def wait(self, addresses, value):
            pass

        def word(self, rank, number):
            return 0

        address = copy = word

    box = Mailbox(0, 2, 48, lambda num_bytes, words: Nowhere())
    with pytest.raises(ValueError, match="a message of 56 bytes; this mailbox is for at most 48"):
        box.send(1, torch.empty(7, dtype=torch.float64))


class NotingWindow:
    """Notes in ``calls`` what is asked of it: addresses as (rank, offset), words as (rank, number)."""

    def __init__(self, calls, num_bytes):
        self.calls, self.num_bytes = calls, num_bytes

    def address(self, rank):
        return rank << 40

    def word(self, rank, number):
        return rank, number

    def memory(self):
        return torch.arange(self.num_bytes, dtype=torch.uint8)

    def current_queue(self):
        return NotingQueue(self.calls, "here")

    def side_queue(self):
        return NotingQueue(self.calls, "beside")

    def mark(self):
        return "mark", len(self.calls)

    def after(self, mark):
        self.calls.append(("after", mark))

    def keep(self, x):
        self.calls.append(("keep", x.data_ptr()))


class NotingQueue:
    def __init__(self, calls, stream):
        self.calls, self.stream = calls, stream

    def copy(self, target, source, num_bytes):
        self.calls.append((self.stream, "copy", target, source, num_bytes))

    def wait(self, words, value):
        self.calls.append((self.stream, "wait", words, value))

    def write(self, words, value):
        self.calls.append((self.stream, "write", words, value))


def place(rank, offset):
    return (rank << 40) + offset


def noted(size, rank):
    """Engines of ``rank``, what they ask of their windows, and the sizes of these."""
    calls, opened = [], []

    def open_window(num_bytes, words):
        opened.append((num_bytes, words))
        return NotingWindow(calls, num_bytes)

    return CopyEngines(rank, size, open_window), calls, opened


def test_the_order_of_a_gather():
    """The fourth gather of rank 1 of three reuses the slot of the first, which the peers must have read."""
    engines, calls, opened = noted(3, 1)
    x = torch.zeros(2, 4, dtype=torch.uint8)
    for _ in range(3):
        engines.all_gather(x).wait()
    assert not any(call[1] == "wait" and call[2][0][1] > 2 for call in calls)  # the first find slots that are free
    calls.clear()
    transfer = engines.all_gather(x)
    finished, full = ("mark", len(calls)), transfer.wait()
    start, local, out = 8 * (4 % 3), x.data_ptr(), full.data_ptr()
    assert opened == [(3 * 8, 6)] and full.shape == (6, 4)
    assert calls == [
        ("here", "wait", [(1, 5), (1, 3)], 1),
        ("here", "copy", place(1, start), local, 8),
        ("here", "copy", out + 8, local, 8),
        ("beside", "write", [(2, 1), (0, 1)], 4),
        ("beside", "wait", [(1, 2)], 4),
        ("beside", "copy", out + 16, place(2, start), 8),
        ("beside", "write", [(2, 4)], 4),
        ("beside", "wait", [(1, 0)], 4),
        ("beside", "copy", out, place(0, start), 8),
        ("beside", "write", [(0, 4)], 4),
        ("after", finished),
    ]


def test_the_order_of_an_exchange():
    """The fifth exchange of rank 1 of three: parts may be reused after they were sent, and slots are free after their
    contents were consumed."""
    engines, calls, opened = noted(3, 1)
    parts = list(torch.arange(12, dtype=torch.uint8).view(3, 4))
    for _ in range(4):
        engines.exchange(parts, torch.cat).wait()
    calls.clear()
    transfer = engines.exchange(parts, lambda received: calls.append("consume") or torch.cat(received))
    sent, start = ("mark", len(calls)), 12 * (5 % 3)
    result = transfer.wait()
    assert opened == [(3 * 12, 6)]
    assert result.tolist() == [*range(start, start + 4), *range(4, 8), *range(start + 8, start + 12)]
    assert calls == [
        ("beside", "wait", [(1, 5)], 2),
        ("beside", "copy", place(2, start + 4), parts[2].data_ptr(), 4),
        ("beside", "write", [(2, 1)], 5),
        ("beside", "wait", [(1, 3)], 2),
        ("beside", "copy", place(0, start + 4), parts[0].data_ptr(), 4),
        ("beside", "write", [(0, 1)], 5),
        ("after", sent),
        ("here", "wait", [(1, 2), (1, 0)], 5),
        "consume",
        ("here", "write", [(2, 4), (0, 4)], 5),
    ]


def test_larger_messages_open_a_separate_window_and_smaller_ones_use_nccl():
    engines, calls, opened = noted(2, 0)
    for size in (1, 4, 8, 6):
        engines.all_gather(torch.zeros(size, dtype=torch.uint8))
    assert opened == [(3, 4), (12, 4), (24, 4)]
    assert [call[3] for call in calls if call[:2] == ("beside", "write")] == 3 * [1, 1] + [2, 2]  # counted per window
    assert not engines.carries((1 << 20) - 1) and engines.carries(1 << 20)
    assert engines.mailbox(6) is engines.mailbox(6) is not engines.mailbox(8)


def test_the_order_of_messages():
    """The fourth one from rank 1 of three to the next, and that from the rank before it."""
    engines, calls, opened = noted(3, 1)
    box, x = engines.mailbox(6), torch.zeros(6, dtype=torch.uint8)
    assert opened == [(18, 2)] * 2
    for _ in range(3):
        box.send(2, x)
        box.receive(0, x)
    assert ("beside", "wait", [(1, 1)], 0) not in calls
    calls.clear()
    box.send(2, x)
    box.receive(0, x)
    box.receive(2, x)  # the other lane counts for itself
    local, start = x.data_ptr(), 6 * (4 % 3)
    assert calls == [
        ("beside", "wait", [(1, 1)], 1),
        ("beside", "copy", place(2, start), local, 6),
        ("beside", "write", [(2, 0)], 4),
        ("keep", local),
        ("here", "wait", [(1, 0)], 4),
        ("here", "copy", local, place(1, start), 6),
        ("here", "write", [(0, 1)], 4),
        ("here", "wait", [(1, 0)], 1),
        ("here", "copy", local, place(1, 6), 6),
        ("here", "write", [(2, 1)], 1),
    ]


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
