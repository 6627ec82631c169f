"""Limits of uvicorn's connections: their number, deadlines of clients, lines of log, and the end after a signal.

A connection *waits* while its client has not sent a full request. If there are too many connections, the one that has
waited longest is closed: idle or slow clients never keep others out."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.core.inference.server.fields import RequestError
from megatron.core.inference.server.service import EngineService

MAX_CONNECTIONS = 4096
HEADER_SECONDS = 10
"""Time that a client has for the headers of a request, idle time between requests included."""
BODY_SECONDS = 30
"""Time that a client has for the body of a request."""
WRITE_SECONDS = 60
"""Time that a client has to read a full buffer of its answer."""
GRACE_SECONDS = 5
"""Time that requests in progress have to finish after a signal."""
LINGER_SECONDS = 5
"""Time that a server whose engine has failed answers requests with the reason, before the process ends."""
MAX_RECORDS, RECORDS_SECONDS = 20, 60
"""Largest number of log records of a logger in this time."""


class Connection(H11Protocol):
    """An HTTP connection with deadlines.

    Args:
        waiting: the connections of the server that wait, the one that has waited longest first.
        limit: largest number of connections of the server."""

    def __init__(self, *args: Any, waiting: OrderedDict[Connection, None], limit: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting, self._limit = waiting, limit
        self._header_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def has_request(self) -> bool:
        """Whether the headers of a request have arrived whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # without it the second part of an answer waits 40 ms for the client's acknowledgment of the first
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._update()
        if len(self.connections) > self._limit:
            oldest = next(iter(self._waiting))
            oldest.end() if oldest is not self else self._refuse()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._waiting.pop(self, None)
        for deadline in (self._header_deadline, self._write_deadline):
            if deadline is not None:
                deadline.cancel()

    def _update(self) -> None:
        """Start or end the deadline of headers, and the wait for the client, as the state of the request says."""
        if self.transport.is_closing():
            return
        if self.has_request and self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
        elif not self.has_request and self._header_deadline is None:
            self._header_deadline = self.loop.call_later(HEADER_SECONDS, self.end)
        if self.has_request and not self.cycle.more_body:
            self._waiting.pop(self, None)
        else:
            self._waiting.setdefault(self)

    def end(self) -> None:
        """Close the connection, without waiting for a client that does not read."""
        self._waiting.pop(self, None)
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _refuse(self) -> None:
        """Answer that all connections have a request in progress."""
        error = RequestError(f"the server has {self._limit} connections with requests; try again later", status=503)
        self.transport.write(_answer(b"503 Service Unavailable", error))
        self.end()

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP, unless an answer has begun."""
        if not self.has_request and self.conn.our_state is h11.IDLE:
            self.transport.write(_answer(b"400 Bad Request", RequestError(msg)))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def shutdown(self) -> None:
        """Close the connection after the answer in progress; at once if the request is incomplete."""
        if self in self._waiting:
            self.end()
            return
        if self.has_request and not self.cycle.response_started:
            # without it the client sends its next request on this connection, which closes
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]
        super().shutdown()


def _answer(status: bytes, error: RequestError) -> bytes:
    body = json.dumps(error.body()).encode()
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(body)) + body


def connection_limits(limit: int = MAX_CONNECTIONS) -> tuple[int, int]:
    """Return the largest number of connections, at most ``limit``, and the backlog of the socket. This process has file
    descriptors for both; raises its soft limit for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * limit
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    elif soft == resource.RLIM_INFINITY:
        soft = needed
    backlog = max(4, min(128, soft // 32))
    # asyncio accepts a full backlog before the first of these connections is counted, and closes with a delay
    return max(1, min(limit, soft - soft // 8 - 4 * backlog)), backlog


class LimitedLog(logging.Filter):
    """Passes few records per minute, so that clients cannot fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._begin, self._count = time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._begin > RECORDS_SECONDS:
            if self._count > MAX_RECORDS:
                record.msg = f"[{self._count - MAX_RECORDS} messages were dropped] {record.msg}"
            self._begin, self._count = now, 0
        self._count += 1
        return self._count <= MAX_RECORDS


@contextmanager
def limited_logs() -> Iterator[None]:
    """Context in which asyncio and uvicorn log few records per minute."""
    limits = {logging.getLogger(name): LimitedLog() for name in ("asyncio", "uvicorn.error")}
    for log, limit in limits.items():
        log.addFilter(limit)
    try:
        yield
    finally:
        for log, limit in limits.items():
            log.removeFilter(limit)


class Program(uvicorn.Server):
    """uvicorn's server: ``run(sockets=[...])`` serves until a signal, ``should_exit``, or a failed engine."""

    def __init__(self, app: Any, service: EngineService, max_connections: int = MAX_CONNECTIONS) -> None:
        limit, backlog = connection_limits(max_connections)
        protocol = partial(Connection, waiting=OrderedDict(), limit=limit)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                log_level="warning",
                backlog=backlog,
                timeout_keep_alive=HEADER_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS + 10,
            )
        )
        self._service = service
        self._end: float | None = None

    async def serve(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        with limited_logs():
            await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        failure = self._service.failure
        if self._end is None and failure is not None and failure.is_fault:
            self._end = time.monotonic() + LINGER_SECONDS
        return await super().on_tick(counter) or (self._end is not None and time.monotonic() > self._end)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after a signal, at once after a second one. Unlike uvicorn's method, do not raise the signal again: this
        rank still has to end the other ranks."""
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._service.close)
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        """Let requests in progress finish for :data:`GRACE_SECONDS`; then they get an error."""
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._service.close)
        await super().shutdown(sockets)
