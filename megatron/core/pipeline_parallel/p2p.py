"""Hidden states and their gradients between pipeline stages: the sends and receives that a schedule implies.

From one rank to another, messages travel in the order in which the sender computes them, which the receiver knows from
the schedule; it posts its receives in that order, as early as it likes. On GPUs nothing here stops the host; streams
wait. What carries a message is a wire:

    ``_GroupWire``     sends and receives of torch.distributed. Traffic up and down the ranks runs in two groups of its
                       own (``groups.pp_up``, ``groups.pp_down``): in each, two ranks talk in one direction only, so
                       that a receive which waits never stands in the way of a send.
    ``_MailboxWire``   copy engines, between GPUs of one host: who receives need not be there when a message comes.

A message is one tensor or several (of a model with two stacks), of the same shapes at every boundary.
Micro-batches may differ in length where every rank knows all lengths in advance (``MessageShape.lengths``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.pipeline_parallel.actions import Action, Place, Schedule

Message = tuple[Tensor, ...]


class MessageShape(NamedTuple):
    """Shapes of the tensors of a message, their dtype and device."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    lengths: tuple[int, ...] | None = None
    """The first dimension of each micro-batch's messages, where they differ; ``shapes`` are then the largest."""

    def of(self, microbatch: int) -> MessageShape:
        """That of one micro-batch's messages."""
        if self.lengths is None:
            return self
        return self._replace(shapes=tuple((self.lengths[microbatch], *shape[1:]) for shape in self.shapes))

    @property
    def sizes(self) -> list[int]:
        """Numbers of elements."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    def empty(self) -> Message:
        return tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in self.shapes)


class _Lane:
    """Messages from rank ``source`` of the pipeline to rank ``target``, numbered in the sender's order."""

    def __init__(self, schedule: Schedule, source: int, target: int) -> None:
        self.source, self.target = source, target
        sent = (action for action in schedule.actions[source] if _goes_to(schedule, source, action, target))
        self.number: dict[Action, int] = {action: number for number, action in enumerate(sent)}
        """By the sender's action."""


def _goes_to(schedule: Schedule, source: int, action: Action, target: int) -> bool:
    place = schedule.target(source, action)
    return place is not None and place.rank == target and source != target


class _Wire(Protocol):
    def start_receive(self, lane: _Lane, number: int, message: MessageShape) -> Callable[[], Message]:
        """Post a receive, in the order of numbers; returns what waits for the message, in stream order."""

    def send(self, lane: _Lane, number: int, message: Message) -> None:
        """Start to send; the tensors are let go once they have arrived."""

    def finish(self) -> None:
        """Wait until everything has been sent."""


class _GroupWire:
    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._sending: deque[tuple[Tensor, dist.Work]] = deque()

    def _group(self, lane: _Lane) -> Group:
        return self._groups.pp_up if lane.target > lane.source else self._groups.pp_down

    def start_receive(self, lane: _Lane, number: int, message: MessageShape) -> Callable[[], Message]:
        buffers, group = message.empty(), self._group(lane)
        # gloo matches by tag; NCCL ignores tags and matches in the order of posting, hence the order of numbers
        works = [
            dist.irecv(buffer, group.ranks[lane.source], group=group.handle, tag=number * len(buffers) + index)
            for index, buffer in enumerate(buffers)
        ]

        def wait() -> Message:
            for work in works:
                assert work is not None
                work.wait()  # on CUDA the current stream waits, not the host
            return buffers

        return wait

    def send(self, lane: _Lane, number: int, message: Message) -> None:
        group = self._group(lane)
        for index, tensor in enumerate(message):
            tag = number * len(message) + index
            work = dist.isend(tensor, group.ranks[lane.target], group=group.handle, tag=tag)
            assert work is not None
            # the tensor must outlive its send: the allocator would give its memory away while it is still read
            self._sending.append((tensor, work))
        while self._sending and self._sending[0][1].is_completed():
            self._sending.popleft()

    def finish(self) -> None:
        for _, work in self._sending:
            work.wait()
        self._sending.clear()


class _MailboxWire:
    def __init__(self, engines: Any, largest: MessageShape) -> None:
        # tensors travel as one: each number takes one slot, as schedules need them. One mailbox, of the largest, serves
        # all lengths: a new one per length would map memory between ranks in every iteration
        self._mailbox = engines.mailbox(largest.dtype.itemsize * sum(largest.sizes))
        self._unread: dict[_Lane, deque[tuple[int, MessageShape]]] = {}
        self._read: dict[tuple[_Lane, int], Message] = {}

    def start_receive(self, lane: _Lane, number: int, message: MessageShape) -> Callable[[], Message]:
        self._unread.setdefault(lane, deque()).append((number, message))

        def wait() -> Message:
            # a mailbox hands messages out in the order of sending: take out those before the one that is asked for
            while (lane, number) not in self._read:
                first, its = self._unread[lane].popleft()
                flat = torch.empty(sum(its.sizes), dtype=its.dtype, device=its.device)
                self._mailbox.receive(lane.source, flat)
                self._read[lane, first] = tuple(map(Tensor.view, flat.split(its.sizes), its.shapes))
            return self._read.pop((lane, number))

        return wait

    def send(self, lane: _Lane, number: int, message: Message) -> None:
        self._mailbox.send(lane.target, message[0] if len(message) == 1 else torch.cat([x.flatten() for x in message]))

    def finish(self) -> None:
        """The stream that sends keeps what it needs."""


def _shown(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(map(str, shapes))


class Messages:
    """All messages of one rank during one run of ``schedule``.

    ``post`` and ``receive`` are told the action that needs a message, ``send`` the one that made it. Everything is
    keyed by actions, so that no caller counts anything.
    """

    def __init__(self, schedule: Schedule, groups: ProcessGroups, message: MessageShape) -> None:
        self.schedule, self.rank, self.message = schedule, groups.pp.rank, message
        neighbours = {(self.rank - 1) % groups.pp.size, (self.rank + 1) % groups.pp.size} - {self.rank}
        self._inbound = {peer: _Lane(schedule, peer, self.rank) for peer in neighbours}
        self._outbound = {peer: _Lane(schedule, self.rank, peer) for peer in neighbours}
        self._expected = {peer: deque(lane.number) for peer, lane in self._inbound.items()}
        engines = groups.pp.engines
        self._wire: _Wire = _GroupWire(groups) if engines is None else _MailboxWire(engines, message)
        self._posted: dict[Place, Callable[[], Message]] = {}
        self._at_home: dict[Place, Message] = {}
        """Between chunks of the same rank."""

    def post(self, action: Action) -> None:
        """Start to receive the input of ``action``, and whatever its sender sends before."""
        place = self.schedule.source(self.rank, action)
        if place is None or place.rank == self.rank or place in self._posted:
            return
        lane, expected = self._inbound[place.rank], self._expected[place.rank]
        # what the sender sends before has to be posted before: else this receive gets an earlier message
        while place not in self._posted:
            sent = expected.popleft()
            self._posted[Place(place.rank, sent)] = self._wire.start_receive(
                lane, lane.number[sent], self.message.of(sent.microbatch)
            )

    def receive(self, action: Action) -> Message | None:
        """The input of ``action``; None where it has none."""
        place = self.schedule.source(self.rank, action)
        if place is None:
            return None
        if place.rank == self.rank:
            return self._at_home.pop(place)
        self.post(action)
        return self._posted.pop(place)()

    def send(self, action: Action, message: Message) -> None:
        """Start to send the result of ``action`` to the rank that needs it."""
        place = self.schedule.target(self.rank, action)
        if place is None:
            return
        if place.rank == self.rank:
            # detached, as if it had travelled: the next chunk's backward ends here and sends its gradient on
            self._at_home[Place(self.rank, action)] = tuple(tensor.detach() for tensor in message)
            return
        made, wanted = tuple(tuple(tensor.shape) for tensor in message), self.message.of(action.microbatch).shapes
        dtypes = {tensor.dtype for tensor in message}
        if made != wanted or dtypes != {self.message.dtype}:
            raise ValueError(
                f"a pipeline stage made {_shown(made)} {', '.join(map(str, dtypes))}, but stages pass on "
                f"{_shown(wanted)} {self.message.dtype}: all micro-batches must have seq_length x micro_batch_size "
                "tokens, and config.pipeline_dtype must be the dtype of the hidden states"
            )
        lane = self._outbound[place.rank]
        self._wire.send(lane, lane.number[action], tuple(tensor.detach().contiguous() for tensor in message))

    def finish(self) -> None:
        """Wait until everything has been sent. Whatever was announced must have been received."""
        self._wire.finish()
        assert not self._posted and not any(self._expected.values()), "messages that no action asked for"
