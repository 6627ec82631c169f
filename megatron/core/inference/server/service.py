"""The engine in a thread: it steps while there is work, and takes requests and cancellations between steps."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import FinishReason, Output, Request, TokenScore

logger = logging.getLogger(__name__)
IDLE_SECONDS = 60.0
"""Time between the engine's signs of life to the other ranks."""


class Overloaded(UserError):
    """Too many unfinished requests."""


class EngineFailed(UserError):
    """The engine has ended; no request can run."""

    is_fault = False
    """Whether an error ended it, not :meth:`EngineService.stop`."""


@dataclass(frozen=True)
class Event:
    """Progress of a request. Every request ends with an event with ``finish_reason`` or ``error``, or is cancelled."""

    token: int | None = None
    """New token of the text."""
    score: TokenScore | None = None
    """Score of the sampled token, which may be a stop token."""
    prompt_scores: Sequence[TokenScore | None] = ()
    """All scores of the prompt, if requested."""
    finish_reason: FinishReason | None = None
    error: UserError | None = None


Listener = Callable[[Event], None]
"""Receives the events of a request in the engine's thread; must not block or raise."""


class Ticket:
    """A submitted request."""

    def __init__(self, request: Request, listener: Listener) -> None:
        self.request, self.listener = request, listener
        self.number: int | None = None
        """Number in the engine; None: not added yet, or ended."""
        self.is_done = False


class EngineService:
    """Runs ``engine`` in a thread from :meth:`start` to :meth:`stop`. Other methods may be called from any thread."""

    def __init__(self, engine: Engine, max_requests: int) -> None:
        self.engine, self.max_requests = engine, max_requests
        self._wake = threading.Condition()
        self._new: deque[Ticket] = deque()
        self._cancelled: list[Ticket] = []
        self._unfinished: set[Ticket] = set()
        self._running: dict[int, Ticket] = {}
        self._stopping = False
        self._failure: EngineFailed | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; requests in progress get an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def failure(self) -> EngineFailed | None:
        """The error that ended the engine."""
        return self._failure

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._unfinished)

    def submit(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> list[Ticket]:
        """Queue ``requests``. An invalid one gets an event with its error. Raises Overloaded if all of them would
        exceed ``max_requests`` unfinished ones, and EngineFailed."""
        tickets = [Ticket(request, listener) for request, listener in zip(requests, listeners)]
        with self._wake:
            if self._failure is not None:
                raise self._failure
            if len(self._unfinished) + len(tickets) > self.max_requests:
                raise Overloaded(
                    f"the server has {len(self._unfinished)} unfinished requests of at most {self.max_requests}; "
                    f"{len(tickets)} more do not fit: try again later"
                )
            self._unfinished.update(tickets)
            self._new.extend(tickets)
            self._wake.notify()
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """End ``tickets`` and free their pages before the next step, without further events."""
        with self._wake:
            self._cancelled += [each for each in tickets if not each.is_done]
            self._wake.notify()

    def _run(self) -> None:
        failure = EngineFailed("the server stops")
        try:
            while self._update():
                if self.engine.has_work:
                    for output in self.engine.step():
                        self._report(output)
        except Exception as error:  # whatever it is: clients must not wait forever
            logger.exception("the engine failed")
            failure = EngineFailed(f"the engine failed: {error}")
            failure.is_fault = True
        with self._wake:
            self._failure = failure
            rest, self._unfinished = self._unfinished, set()
            self._running.clear()
            for ticket in rest:
                ticket.is_done = True
        for ticket in rest:
            ticket.listener(Event(error=failure))

    def _update(self) -> bool:
        """Wait for work; add and cancel requests. Return False to end the thread."""
        with self._wake:
            while not (self._stopping or self._new or self._cancelled or self.engine.has_work):
                if not self._wake.wait(IDLE_SECONDS):
                    self.engine.keep_alive()
            new, cancelled = list(self._new), self._cancelled
            self._new.clear()
            self._cancelled = []
            if self._stopping:
                return False
        for ticket in new:
            if ticket not in cancelled:
                self._add(ticket)
        for ticket in cancelled:
            if ticket.number is not None:
                self.engine.cancel(ticket.number)
            self._end(ticket)
        return True

    def _add(self, ticket: Ticket) -> None:
        try:
            ticket.number = self.engine.add(ticket.request)
        except UserError as error:
            self._end(ticket)
            ticket.listener(Event(error=error))
        else:
            self._running[ticket.number] = ticket

    def _report(self, output: Output) -> None:
        ticket, done = self._running[output.request], output.completion
        if done.finish_reason is not None:
            self._end(ticket)
        scores = done.scores[-1] if done.scores else None
        ticket.listener(Event(output.token, scores, done.prompt_scores, done.finish_reason))

    def _end(self, ticket: Ticket) -> None:
        if ticket.number is not None:
            self._running.pop(ticket.number, None)
            ticket.number = None
        with self._wake:
            ticket.is_done = True
            self._unfinished.discard(ticket)
