"""Messages of several tensors between ranks that are all played by this process: which wire carries what, and when."""

import dataclasses
import weakref
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch

from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.pipeline_parallel import p2p
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.microbatches import of_rows
from megatron.core.pipeline_parallel.p2p import Messages, MessageShape
from megatron.core.pipeline_parallel.schedule_interleaved import interleaved
from megatron.core.pipeline_parallel.schedule_plain import one_forward_one_backward

SHAPES = ((4, 2, 3), (2, 2, 3))
SCHEDULE = one_forward_one_backward(2, 2)
CPU = torch.device("cpu")
SHAPE = MessageShape(SHAPES, torch.float64, CPU)


class Engines:
    """Copy engines of one rank; ``sent`` and ``sizes`` are shared by all ranks."""

    def __init__(self, rank, sent, sizes):
        self.rank, self.sent, self.sizes = rank, sent, sizes

    def mailbox(self, num_bytes):
        self.sizes.append(num_bytes)
        return self

    def send(self, target, x):
        self.sent[self.rank, target].append(x.clone())

    def receive(self, source, out):
        out.copy_(self.sent[source, self.rank].popleft().flatten())


class Backend:
    """Sends and receives of torch.distributed, matched by group and tag."""

    def __init__(self):
        self.sent, self.posted, self.alive, self.waited, self.done = {}, [], [], 0, False

    def isend(self, tensor, peer, group, tag):
        self.sent[group, peer, tag] = tensor.clone()
        self.alive.append(weakref.ref(tensor))
        return SimpleNamespace(wait=self._wait, is_completed=lambda: self.done)

    def _wait(self):
        self.waited += 1

    def irecv(self, buffer, peer, group, tag):
        self.posted.append((group, peer, tag))
        target = {10: 11, 11: 10}[peer]
        return SimpleNamespace(wait=lambda: buffer.copy_(self.sent.pop((group, target, tag))))


def ends(schedule=SCHEDULE, engines=None, shape=SHAPE):
    """Messages of every rank; ``engines`` of each: None for sends and receives of torch.distributed."""
    all_ranks = tuple(range(10, 10 + schedule.num_ranks))
    ranks = [
        dataclasses.replace(
            SINGLE_PROCESS, pp=Group("pp", all_ranks, rank, engines=engines and engines[rank]),
            pp_up=Group("pp_up", all_ranks, rank, "up"), pp_down=Group("pp_down", all_ranks, rank, "down"),
        )
        for rank in range(schedule.num_ranks)
    ]  # fmt: skip
    return [Messages(schedule, groups, shape) for groups in ranks]


def engines_of(num_ranks):
    sent, sizes = defaultdict(deque), []
    return [Engines(rank, sent, sizes) for rank in range(num_ranks)]


def message(number):
    return tuple(torch.arange(float(size[0] * 6), dtype=torch.float64).view(size) + 100 * number for size in SHAPES)


def assert_equal(results, expected):
    assert len(results) == len(expected) and all(map(torch.equal, results, expected))
    assert [result.dtype for result in results] == [item.dtype for item in expected]


@pytest.mark.parametrize("through_engines", [False, True])
def test_each_message_is_complete_and_reaches_the_action_that_needs_it(monkeypatch, through_engines):
    engines, backend = engines_of(2) if through_engines else None, Backend()
    monkeypatch.setattr(p2p, "dist", backend)
    first, last = ends(engines=engines)
    for kind, sender, receiver in (("F", first, last), ("B", last, first)):
        for number in range(2):
            sender.send(Action(kind, 0, number), message(number))
        # asked for in another order than sent: what comes before is received, and waits
        for number in (1, 0):
            assert_equal(receiver.receive(Action(kind, 0, number)), message(number))
    first.finish()
    last.finish()
    assert first.receive(Action("F", 0, 0)) is None and not backend.sent
    assert backend.waited == (0 if through_engines else 8)
    if through_engines:
        assert engines[0].sizes == [8 * (24 + 12)] * 2 and not any(engines[0].sent.values())
    else:
        assert backend.posted == [(group, peer, tag) for group, peer in (("up", 10), ("down", 11)) for tag in range(4)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_mailboxes_keep_the_order_of_each_sender(num_ranks):
    """With two ranks, chunks after the first send up and down between the same two, in an order that differs by
    rank."""
    schedule = interleaved(num_ranks, 2, 4)
    number = {(rank, action): index for rank in range(num_ranks) for index, action in enumerate(schedule.actions[rank])}
    every = ends(schedule, engines_of(num_ranks))
    for rank, action in number:
        every[rank].send(action, message(10 * number[rank, action] + rank))
    for rank, action in number:
        place, result = schedule.source(rank, action), every[rank].receive(action)
        assert (result is None) == (place is None)
        if place is not None:
            assert_equal(result, message(10 * number[place] + place.rank))
    for item in every:
        item.finish()


@pytest.mark.parametrize("through_engines", [False, True])
def test_micro_batches_have_separate_lengths(monkeypatch, through_engines):
    engines = engines_of(2) if through_engines else None
    monkeypatch.setattr(p2p, "dist", Backend())
    first, last = ends(engines=engines, shape=of_rows(MessageShape(((4, 2, 3),), torch.float64, CPU), [6, 16], 8))
    rows = [torch.arange(3.0 * n, dtype=torch.float64).view(n, 1, 3) for n in (3, 8)]
    for kind, sender, receiver in (("F", first, last), ("B", last, first)):
        for number in range(2):
            sender.send(Action(kind, 0, number), (rows[number],))
        for number in (1, 0):
            assert_equal(receiver.receive(Action(kind, 0, number)), (rows[number],))
    assert engines is None or engines[0].sizes == [8 * 8 * 3] * 2
    with pytest.raises(ValueError, match=r"made \(8, 1, 3\) torch.float64, but stages pass on \(3, 1, 3\)"):
        first.send(Action("F", 0, 0), (rows[1],))


@pytest.mark.parametrize("through_engines", [False, True])
def test_gradients_of_frozen_tensors_are_not_sent(monkeypatch, through_engines):
    """The last tensor of each forward message is frozen; the tensors of a row differ in the last dim only."""
    engines = engines_of(2) if through_engines else None
    monkeypatch.setattr(p2p, "dist", Backend())
    both = MessageShape(((4, 2, 3), (4, 2, 5)), torch.float64, CPU, num_frozen=1)
    first, last = ends(engines=engines, shape=of_rows(both, [6, 16], 8))
    rows = [tuple(torch.randn(n, 1, hidden, dtype=torch.float64) for hidden in (3, 5)) for n in (3, 8)]
    for number in range(2):
        first.send(Action("F", 0, number), rows[number])
        last.send(Action("B", 0, number), rows[number][:1])
    for number in range(2):
        assert_equal(last.receive(Action("F", 0, number)), rows[number])
        assert_equal(first.receive(Action("B", 0, number)), rows[number][:1])
    with pytest.raises(ValueError, match=r"\(3, 1, 5\) torch.float64, but stages pass on \(3, 1, 3\)"):
        last.send(Action("B", 0, 0), rows[0])


def test_a_message_is_kept_until_it_has_been_sent(monkeypatch):
    backend = Backend()
    monkeypatch.setattr(p2p, "dist", backend)
    first, _ = ends()
    first.send(Action("F", 0, 0), message(0))
    assert all(item() is not None for item in backend.alive)
    backend.done = True
    first.send(Action("F", 0, 1), message(1))
    assert all(item() is None for item in backend.alive)


def test_sent_tensor_is_detached_and_contiguous(monkeypatch):
    saved, (engines, _) = [], engines_of(2)
    monkeypatch.setattr(engines, "send", lambda target, x: saved.append(x))
    shape = MessageShape(((3, 2),), torch.float64, CPU)
    groups = dataclasses.replace(SINGLE_PROCESS, pp=Group("pp", (10, 11), 0, engines=engines))
    tensor = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    Messages(SCHEDULE, groups, shape).send(Action("F", 0, 0), (tensor.t(),))
    assert saved[0].is_contiguous() and not saved[0].requires_grad and saved[0].shape == (3, 2)


def test_a_message_of_another_shape_or_dtype_is_rejected():
    first, _ = ends(engines=engines_of(2))
    encoder, decoder = message(0)
    expected = r"a pipeline stage made \(4, 2, 3\) and \(1, 2, 3\) torch.float64, but stages pass on \(4, 2, 3\) and"
    with pytest.raises(ValueError, match=expected):
        first.send(Action("F", 0, 0), (encoder, decoder[:1]))
    with pytest.raises(ValueError, match="torch.float32, but"):
        first.send(Action("F", 0, 0), (encoder.float(), decoder.float()))
    with pytest.raises(AssertionError, match="messages that no action asked for"):
        first.finish()
