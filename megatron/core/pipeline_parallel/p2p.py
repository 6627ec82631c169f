"""Hidden states and their gradients between pipeline stages: the sends and receives that a schedule implies.

From one rank to another, messages travel in the order in which the sender computes them, which the receiver knows from
the schedule; it posts its receives in that order, as early as it likes. Traffic up and down the ranks runs in two
groups of its own (``groups.pp_up``, ``groups.pp_down``): in each, two ranks talk in one direction only, so that a
receive which waits never stands in the way of a send. With NCCL nothing here stops the host; streams wait.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.pipeline_parallel.actions import Action, Place, Schedule
from megatron.core.process_groups import Group, ProcessGroups


class TensorShape(NamedTuple):
    """What one message is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Lane:
    """Messages from rank ``source`` of the pipeline to rank ``target``, numbered in the sender's order."""

    def __init__(self, schedule: Schedule, source: int, target: int, groups: ProcessGroups) -> None:
        self.group: Group = groups.pp_up if target > source else groups.pp_down
        self.source, self.target = self.group.ranks[source], self.group.ranks[target]
        sent = (action for action in schedule.actions[source] if _goes_to(schedule, source, action, target))
        self.number: dict[Action, int] = {action: number for number, action in enumerate(sent)}
        """By the sender's action."""


def _goes_to(schedule: Schedule, source: int, action: Action, target: int) -> bool:
    place = schedule.target(source, action)
    return place is not None and place.rank == target and source != target


class Messages:
    """All messages of one rank during one run of ``schedule``.

    ``post`` and ``receive`` are told the action that needs a message, ``send`` the one that made it. Everything is
    keyed by actions, so that no caller counts anything.
    """

    def __init__(self, schedule: Schedule, groups: ProcessGroups, message: TensorShape) -> None:
        self.schedule, self.rank, self.message = schedule, groups.pp.rank, message
        neighbours = {(self.rank - 1) % groups.pp.size, (self.rank + 1) % groups.pp.size} - {self.rank}
        self._inbound = {peer: _Lane(schedule, peer, self.rank, groups) for peer in neighbours}
        self._outbound = {peer: _Lane(schedule, self.rank, peer, groups) for peer in neighbours}
        self._expected = {peer: deque(lane.number) for peer, lane in self._inbound.items()}
        self._posted: dict[Place, tuple[Tensor, dist.Work]] = {}
        self._sending: deque[tuple[Tensor, dist.Work]] = deque()
        self._at_home: dict[Place, Tensor] = {}
        """Between chunks of the same rank."""

    def post(self, action: Action) -> None:
        """Start to receive the input of ``action``, and whatever its sender sends before."""
        place = self.schedule.source(self.rank, action)
        if place is None or place.rank == self.rank or place in self._posted:
            return
        lane, expected = self._inbound[place.rank], self._expected[place.rank]
        while place not in self._posted:
            sent = expected.popleft()
            buffer = torch.empty(self.message.shape, dtype=self.message.dtype, device=self.message.device)
            work = dist.irecv(buffer, lane.source, group=lane.group.handle, tag=lane.number[sent])
            assert work is not None
            self._posted[Place(place.rank, sent)] = (buffer, work)

    def receive(self, action: Action) -> Tensor | None:
        """The input of ``action``; None where it has none."""
        place = self.schedule.source(self.rank, action)
        if place is None:
            return None
        if place.rank == self.rank:
            return self._at_home.pop(place)
        self.post(action)
        buffer, work = self._posted.pop(place)
        work.wait()
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send the result of ``action`` to whoever needs it; the tensor is let go once it has arrived."""
        place = self.schedule.target(self.rank, action)
        if place is None:
            return
        if place.rank == self.rank:
            self._at_home[Place(self.rank, action)] = tensor.detach()
            return
        if tensor.shape != self.message.shape or tensor.dtype != self.message.dtype:
            raise ValueError(
                f"a pipeline stage made {tuple(tensor.shape)} {tensor.dtype}, but stages pass on "
                f"{tuple(self.message.shape)} {self.message.dtype}: all micro-batches must have seq_length x "
                "micro_batch_size tokens, and config.pipeline_dtype must be the dtype of the hidden states"
            )
        lane, tensor = self._outbound[place.rank], tensor.detach().contiguous()
        work = dist.isend(tensor, lane.target, group=lane.group.handle, tag=lane.number[action])
        assert work is not None
        self._sending.append((tensor, work))
        while self._sending and self._sending[0][1].is_completed():
            self._sending.popleft()

    def finish(self) -> None:
        """Wait until everything has been sent. Whatever was announced must have been received."""
        for _, work in self._sending:
            work.wait()
        self._sending.clear()
        assert not self._posted and not any(self._expected.values()), "messages that no action asked for"
