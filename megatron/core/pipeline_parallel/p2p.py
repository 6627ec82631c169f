"""Point-to-point communication of hidden states and their gradients between pipeline stages, derived from a schedule.

A rank sends to each peer in the order in which it computes. The receiver knows this order from the schedule and posts
its receives in the same order, as early as it wants. On GPUs only streams wait, not the host. Transports:

    ``_GroupWire``     send and receive of torch.distributed. Each direction has a separate communicator
                       (``groups.pp_up``, ``groups.pp_down``), in which any two ranks communicate one way only, so that
                       a pending receive never blocks a send.
    ``_ShapedWire``    as ``_GroupWire``, but each message is preceded by its shapes, for which the host waits.
    ``_MailboxWire``   copy engines between GPUs of one host; a message can arrive before its receive is posted.

A message is one tensor, or several for encoder-decoder models and frozen models next to the trained one, with the same
shapes at every stage boundary. Backward messages omit the tensors of frozen models. The
length may differ between micro-batches if every rank knows all lengths in advance (``MessageShape.lengths``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.pipeline_parallel.actions import Action, RankAction, Schedule

if TYPE_CHECKING:
    from megatron.core.groups.copy_engines.exchange import CopyEngines

Message = tuple[Tensor, ...]
Entry = TypeVar("Entry")


class MessageShape(NamedTuple):
    """Shapes, dtype and device of the tensors of a message."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    lengths: tuple[int, ...] | None = None
    """First dim of the messages by micro-batch, if it varies; ``shapes`` then has the maximum. None: constant."""
    num_frozen: int = 0
    """Number of tensors at the end without gradients, which only forward messages have."""

    def of(self, action: Action) -> MessageShape:
        """Return the shape of the message that ``action`` sends."""
        shapes = self.shapes if action.kind == "F" else self.with_gradients(self.shapes)
        if self.lengths is not None:
            shapes = tuple((self.lengths[action.microbatch], *shape[1:]) for shape in shapes)
        return self._replace(shapes=shapes)

    def with_gradients(self, message: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Return the entries of ``message`` (tensors or shapes) that have gradients."""
        return message[: len(message) - self.num_frozen]

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    def empty(self) -> Message:
        return tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in self.shapes)


class _Lane:
    """Ordered messages from pipeline rank ``source`` to pipeline rank ``target``."""

    def __init__(self, schedule: Schedule, source: int, target: int) -> None:
        """Number the actions of ``source`` whose output goes to the rank ``target``."""
        self.source, self.target = source, target
        sent = (action for action in schedule.actions[source] if _is_sent_to(schedule, source, action, target))
        self.number: dict[Action, int] = {action: number for number, action in enumerate(sent)}
        """Message number, in the order of sending, by the sender's action."""


def _is_sent_to(schedule: Schedule, source: int, action: Action, target: int) -> bool:
    place = schedule.target(source, action)
    return place is not None and place.rank == target and source != target


class _Wire(Protocol):
    def start_receive(self, lane: _Lane, number: int, message: MessageShape) -> Callable[[], Message]:
        """Post a receive, in the order of numbers. Return a function that waits in stream order for the message."""

    def send(self, lane: _Lane, number: int, message: Message) -> None:
        """Call it in the order of numbers. Keeps the tensors until they have been sent."""

    def finish(self) -> None:
        """NCCL: the current stream waits, not the host."""


class _GroupWire:
    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._sending: deque[tuple[Tensor, dist.Work]] = deque()

    def _group(self, lane: _Lane) -> Group:
        return self._groups.pp_up if lane.target > lane.source else self._groups.pp_down

    def start_receive(self, lane: _Lane, number: int, message: MessageShape) -> Callable[[], Message]:
        """Into new buffers, with tags from ``number``."""
        buffers, group = message.empty(), self._group(lane)
        # gloo matches by tag. NCCL ignores tags and matches in posting order, so receives must be posted by number
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
        """Tags from ``number``. Releases the tensors of earlier sends that are complete."""
        group = self._group(lane)
        for index, tensor in enumerate(message):
            tag = number * len(message) + index
            work = dist.isend(tensor, group.ranks[lane.target], group=group.handle, tag=tag)
            assert work is not None
            # keep the tensor until its send is complete: otherwise the allocator reuses memory that is still read
            self._sending.append((tensor, work))
        while self._sending and self._sending[0][1].is_completed():
            self._sending.popleft()

    def finish(self) -> None:
        """With NCCL the current stream waits: memory freed here is reused only by later work of that stream."""
        for _, work in self._sending:
            work.wait()
        self._sending.clear()


class _ShapedWire(_GroupWire):
    """Transport for messages whose shapes the receiver does not know: an int64 tensor with the shapes precedes each.
    ``start_receive`` blocks the host until it has arrived: call it only when the message is needed."""

    def start_receive(self, lane: _Lane, number: int, message: MessageShape) -> Callable[[], Message]:
        """Blocks the host for the shapes. ``message`` gives dtype, device, and the number of tensors and their dims."""
        group = self._group(lane)
        dims = [len(shape) for shape in message.shapes]
        sizes = torch.empty(sum(dims), dtype=torch.int64, device=message.device)
        dist.recv(sizes, group.ranks[lane.source], group=group.handle, tag=2 * number * len(dims))
        shapes = tuple(tuple(shape.tolist()) for shape in sizes.split(dims))
        return super().start_receive(lane, 2 * number + 1, message._replace(shapes=shapes, lengths=None))

    def send(self, lane: _Lane, number: int, message: Message) -> None:
        """The receiver must know the number of tensors and their dims."""
        sizes = [size for tensor in message for size in tensor.shape]
        shapes = torch.tensor(sizes, dtype=torch.int64, device=message[0].device)
        group = self._group(lane)
        tag = 2 * number * len(message)
        work = dist.isend(shapes, group.ranks[lane.target], group=group.handle, tag=tag)
        assert work is not None
        self._sending.append((shapes, work))
        super().send(lane, 2 * number + 1, message)


class _MailboxWire:
    def __init__(self, engines: CopyEngines, largest: MessageShape) -> None:
        # the tensors of a message are concatenated, so that each number takes one slot. A single mailbox, sized for the
        # longest message, serves all lengths: one mailbox per length would map peer memory in every iteration
        self._mailbox = engines.mailbox(largest.dtype.itemsize * sum(largest.sizes))
        self._unread: dict[_Lane, deque[tuple[int, MessageShape]]] = {}
        self._read: dict[tuple[_Lane, int], Message] = {}

    def start_receive(self, lane: _Lane, number: int, message: MessageShape) -> Callable[[], Message]:
        """Nothing is posted. The returned function copies this and all earlier messages of the lane into new tensors
        and keeps the earlier ones: a mailbox returns messages in the order of sending."""
        self._unread.setdefault(lane, deque()).append((number, message))

        def wait() -> Message:
            # a mailbox returns messages in the order of sending: read and store all messages before this number
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
        """The sending stream holds its tensors (``record_stream``)."""


def _as_text(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(map(str, shapes))


class Messages:
    """Sends and receives of one rank during one run of ``schedule``. Messages are identified by actions, so that
    callers count nothing: pass the consuming action to ``post`` and ``receive``, and the producing action to ``send``.
    Messages between chunks of the same rank are passed by reference."""

    def __init__(
        self, schedule: Schedule, groups: ProcessGroups, message: MessageShape, sends_shapes: bool = False
    ) -> None:
        """A collective with copy engines, which open a mailbox. With ``sends_shapes`` only the number of tensors and of
        their dims must equal ``message``; such messages go by torch.distributed."""
        self.schedule, self.rank, self.message, self.sends_shapes = schedule, groups.pp.rank, message, sends_shapes
        neighbours = {(self.rank - 1) % groups.pp.size, (self.rank + 1) % groups.pp.size} - {self.rank}
        self._inbound = {peer: _Lane(schedule, peer, self.rank) for peer in neighbours}
        self._outbound = {peer: _Lane(schedule, self.rank, peer) for peer in neighbours}
        self._expected = {peer: deque(lane.number) for peer, lane in self._inbound.items()}
        engines = groups.pp.engines
        self._wire: _Wire = _GroupWire(groups) if engines is None else _MailboxWire(engines, message)
        if sends_shapes:
            self._wire = _ShapedWire(groups)
        self._posted: dict[RankAction, Callable[[], Message]] = {}
        self._at_home: dict[RankAction, Message] = {}
        """Messages between chunks of this rank, by the action that produced them."""

    def post(self, action: Action) -> None:
        """Post the receive of the input of ``action``, after all earlier messages of its sender; nothing if it is local
        or posted. Blocks the host with ``sends_shapes``."""
        place = self.schedule.source(self.rank, action)
        if place is None or place.rank == self.rank or place in self._posted:
            return
        lane, expected = self._inbound[place.rank], self._expected[place.rank]
        # post the receives of earlier messages first: otherwise this receive would match an earlier message
        while place not in self._posted:
            sent = expected.popleft()
            self._posted[RankAction(place.rank, sent)] = self._wire.start_receive(
                lane, lane.number[sent], self.message.of(sent)
            )

    def receive(self, action: Action) -> Message | None:
        """Return the input of ``action``, once, or None; waits (on CUDA: in stream order). Detached."""
        place = self.schedule.source(self.rank, action)
        if place is None:
            return None
        if place.rank == self.rank:
            return self._at_home.pop(place)
        self.post(action)
        return self._posted.pop(place)()

    def send(self, action: Action, message: Message) -> None:
        """Start to send the output of ``action``, detached and contiguous, to the rank that needs it, and return at
        once; no-op at the pipeline's ends. A chunk of this rank gets them by reference, unchecked. For another rank
        raises ValueError if shapes (except with ``sends_shapes``) or dtype differ from those the receiver expects."""
        place = self.schedule.target(self.rank, action)
        if place is None:
            return
        if place.rank == self.rank:
            # detach as a remote message would be: the next chunk's backward must stop here and send its gradient
            self._at_home[RankAction(self.rank, action)] = tuple(tensor.detach() for tensor in message)
            return
        shapes, expected = tuple(tuple(tensor.shape) for tensor in message), self.message.of(action).shapes
        dtypes = {tensor.dtype for tensor in message}
        if self.sends_shapes and len(shapes) == len(expected):
            expected = shapes
        if shapes != expected or dtypes != {self.message.dtype}:
            raise ValueError(
                f"a pipeline stage made {_as_text(shapes)} {', '.join(map(str, dtypes))}, but stages pass on "
                f"{_as_text(expected)} {self.message.dtype}: all micro-batches must have seq_length x micro_batch_size "
                "tokens, and config.pipeline_dtype must be the dtype of the hidden states"
            )
        lane = self._outbound[place.rank]
        self._wire.send(lane, lane.number[action], tuple(tensor.detach().contiguous() for tensor in message))

    def finish(self) -> None:
        """Wait until all messages have been sent (NCCL: in stream order); asserts that all were received."""
        self._wire.finish()
        assert not self._posted and not any(self._expected.values()), "messages that no action asked for"
