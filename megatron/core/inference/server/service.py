"""The engine in a thread: it steps while there is work, and takes requests and cancellations between steps.

A second thread watches its progress: an engine without progress for ``limit`` seconds waits for a rank that is stopped
or lost, and has failed. Every request then gets an error."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import FinishReason, Output, Request, TokenScore
from megatron.core.inference.sampling import NOT_FINITE

logger = logging.getLogger(__name__)
LIMIT_SECONDS = 300.0
"""Default time without progress after which the engine has failed; a step of a large model on a CPU takes minutes."""
JOIN_SECONDS = 3.0
"""Time that the engine's step has to end when the service stops."""


class Overloaded(UserError):
    """Too many unfinished requests."""


class RequestFailed(UserError):
    """The model cannot answer this request; others continue."""


class EngineFailed(UserError):
    """The engine has ended; no request can run."""

    def __init__(self, message: str, *, is_fault: bool = False) -> None:
        super().__init__(message)
        self.is_fault = is_fault
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
"""Receives the events of a request in a thread of the service; must not block or raise."""


class Ticket:
    """A submitted request."""

    def __init__(self, request: Request, listener: Listener) -> None:
        self.request, self.listener = request, listener
        self.number: int | None = None
        """Number in the engine; None: not added yet, or ended."""
        self.is_done = False


class EngineService:
    """Runs ``engine`` in a thread from :meth:`start` to :meth:`stop`. Other methods may be called from any thread.

    Args:
        max_requests: largest number of unfinished requests.
        limit: seconds without progress after which the engine has failed; 0: no limit."""

    def __init__(self, engine: Engine, max_requests: int, limit: float = LIMIT_SECONDS) -> None:
        self.engine, self.max_requests, self.limit = engine, max_requests, limit
        self._wake = threading.Condition()
        self._new: deque[Ticket] = deque()
        self._cancelled: list[Ticket] = []
        self._unfinished: set[Ticket] = set()
        self._running: dict[int, Ticket] = {}
        self._failure: EngineFailed | None = None
        self._progress = time.monotonic()
        """Time of the end of the last step or sign of life."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="engine watcher", daemon=True)

    def start(self) -> None:
        self._progress = time.monotonic()
        self._thread.start()
        if self.limit:
            self._watcher.start()

    def close(self) -> None:
        """Reject new requests, and end those in progress with an error."""
        self._fail(EngineFailed("the server stops; send the request to another one"))

    def stop(self) -> None:
        """:meth:`close`, and end the engine's thread after its current step, which has failed if it takes long."""
        self.close()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            self._failure = EngineFailed(f"the engine did not end its step within {JOIN_SECONDS:g} s", is_fault=True)
        else:
            self._ended.set()

    @property
    def failure(self) -> EngineFailed | None:
        """The reason why the engine takes no requests any more."""
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
        """End ``tickets`` without further events; their pages are free before the next step."""
        with self._wake:
            open_tickets = [ticket for ticket in tickets if self._finish(ticket)]
            self._cancelled += open_tickets
            self._wake.notify()

    # ---- threads

    def _run(self) -> None:
        try:
            while self._update():
                if self.engine.has_work:
                    for output in self.engine.step():
                        self._report(output)
        except Exception as error:  # any error: clients must not wait forever
            logger.exception("the engine failed")
            self._fail(EngineFailed(f"the engine failed: {error}", is_fault=True))

    def _watch(self) -> None:
        """Fail the engine if it makes no progress for ``limit`` seconds."""
        while not self._ended.wait(self.limit / 20) and self._failure is None:
            if time.monotonic() - self._progress > self.limit:
                reason = f"the engine makes no progress since {self.limit:g} s: a rank is stopped or lost"
                logger.error(reason)
                self._fail(EngineFailed(reason, is_fault=True))

    def _fail(self, failure: EngineFailed) -> None:
        """Reject new requests because of ``failure``, the first one, and report it to all unfinished ones."""
        with self._wake:
            if self._failure is None:
                self._failure = failure
            failed = [ticket for ticket in self._unfinished if not ticket.is_done]
            for ticket in failed:
                self._finish(ticket)
            self._wake.notify()
        for ticket in failed:
            ticket.listener(Event(error=self._failure))

    def _update(self) -> bool:
        """Wait for work, or show the other ranks a sign of life; add and cancel requests. False ends the thread."""
        self._progress = time.monotonic()
        with self._wake:
            is_busy = self._wake.wait_for(self._has_news, (self.limit or LIMIT_SECONDS) / 4)
            if self._failure is not None:
                return False
            new, cancelled = list(self._new), self._cancelled
            self._new.clear()
            self._cancelled = []
        if not is_busy:
            self.engine.keep_alive()  # without the lock: it waits for the other ranks
        for ticket in new:
            if not ticket.is_done:
                self._add(ticket)
        for ticket in cancelled:
            if ticket.number is not None:
                self.engine.cancel(ticket.number)
                self._running.pop(ticket.number)
        return True

    def _has_news(self) -> bool:
        return bool(self._failure or self._new or self._cancelled or self.engine.has_work)

    def _add(self, ticket: Ticket) -> None:
        try:
            ticket.number = self.engine.add(ticket.request)
        except UserError as error:
            self._end(ticket, Event(error=error))
        else:
            self._running[ticket.number] = ticket

    def _report(self, output: Output) -> None:
        ticket, completion = self._running[output.request], output.completion
        score = completion.scores[-1] if completion.scores else None
        event = Event(output.token, score, completion.prompt_scores, completion.finish_reason)
        if completion.finish_reason == "failed":
            event = Event(error=RequestFailed(NOT_FINITE))
        if completion.finish_reason is None:
            if not ticket.is_done:
                ticket.listener(event)
            return
        del self._running[output.request]
        ticket.number = None
        self._end(ticket, event)

    def _end(self, ticket: Ticket, event: Event) -> None:
        """Send the last event of ``ticket`` unless it is cancelled."""
        with self._wake:
            is_open = self._finish(ticket)
        if is_open:
            ticket.listener(event)

    def _finish(self, ticket: Ticket) -> bool:
        """Count ``ticket`` as finished; return whether it was not. The caller holds the lock."""
        was_open, ticket.is_done = not ticket.is_done, True
        self._unfinished.discard(ticket)
        return was_open
