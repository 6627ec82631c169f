"""HTTP server with OpenAI's interface: this file imports Starlette, ``connections.py`` uvicorn (``pip install
'megatron-pretraining[serve]'``).

Handlers run in uvicorn's event loop, the engine in its own thread. Work that grows with a request or an answer
(JSON, tokenization, log-probabilities) runs in a few other threads, so that it delays no stream."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.core.config.errors import UserError
from megatron.core.inference.server.answers import Answer, Choice
from megatron.core.inference.server.connections import BODY_SECONDS, MAX_CONNECTIONS, Program
from megatron.core.inference.server.fields import Fields, RequestError, checked_type
from megatron.core.inference.server.json_text import json_bytes
from megatron.core.inference.server.memory import release_memory
from megatron.core.inference.server.protocol import Job, Model, check_model, read_chat, read_completion, read_megatron
from megatron.core.inference.server.service import EngineFailed, EngineService, Event, Overloaded, RequestFailed

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("chat.html")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN_PATHS = ("/", "/health")
"""Paths that need no token."""
NUM_THREADS = 4
"""Threads that read requests and write answers; more would take time from the engine's thread."""
MAX_DETOKENIZED = 2**18
"""Largest number of tokens of a text; the tokenizer blocks all threads during its work."""
LARGE_SCORES = 64
"""Number of log-probabilities from which a chunk of a stream is written in another thread."""
LARGE_ANSWER = 2**20
"""Bytes of an answer after which unused memory is returned to the system."""
RELEASE_SECONDS = 1
"""Time until then: the answer is released after its last byte was sent."""
READING_BODIES = 64
"""Number of bodies of the maximum size for which there is memory while they arrive."""
Result = TypeVar("Result")
Updates = AsyncGenerator[tuple[Choice, str], None]
"""New texts of choices."""


class Guard:
    """Middleware: the token, or without one the names of this machine in ``Host`` and JSON bodies, which keep web pages
    of other origins from using a local server."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Request(scope)) if scope["type"] == "http" else None
        await (self._app if problem is None else _error_response(problem))(scope, receive, send)

    def _problem(self, request: Request) -> RequestError | None:
        if self._token is None:
            name = re.sub(r":\d+$", "", request.headers.get("host", ""))
            if name not in LOOPBACK:
                return RequestError(f"the host {name!r:.100} is not this machine", status=403)
        elif request.url.path not in OPEN_PATHS:
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return RequestError("a valid token is required: Authorization: Bearer TOKEN", status=401)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method in ("POST", "PUT") and media != "application/json":
            return RequestError("the header Content-Type must be application/json", status=415)
        return None


class Server:
    """Routes of the server."""

    def __init__(self, service: EngineService, info: Model, max_bytes: int) -> None:
        self.service, self.info, self.max_bytes = service, info, max_bytes
        self._num_reading = 0
        """Bytes of bodies that are incomplete."""
        self._created = int(time.time())

    def app(self, token: str | None) -> Starlette:
        """Return the application; its lifespan starts and stops the engine's thread."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            threads = ThreadPoolExecutor(NUM_THREADS, "server")
            asyncio.get_running_loop().set_default_executor(threads)
            self.service.start()
            try:
                yield
            finally:
                await asyncio.to_thread(self.service.stop)

        routes = [Route("/", self.page)]
        for paths, endpoint in (
            (("/health", "/v1/health"), self.health),
            (("/v1/models",), self.models),
            (("/tokenizer_info",), self.tokenizer_info),
        ):
            routes += [Route(path, endpoint) for path in paths]
        for path, post in (("/completions", self.completions), ("/chat/completions", self.chat)):
            routes += [Route(prefix + path, post, methods=["POST"]) for prefix in ("", "/v1")]
        routes.append(Route("/tokenize", self.tokenize, methods=["POST"]))
        routes.append(Route("/detokenize", self.detokenize, methods=["POST"]))
        routes.append(Route("/api", self.megatron, methods=["PUT", "POST"]))
        handlers: dict[Any, Any] = {
            UserError: _failed, HTTPException: _http_failed, ClientDisconnect: _disconnected, Exception: _bug
        }  # fmt: skip
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
        app.add_middleware(Guard, token=token)
        return app

    # ---- small answers

    async def page(self, _: Request) -> Response:
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    async def health(self, _: Request) -> Response:
        if self.service.failure is not None:
            return _error_response(self.service.failure)
        return JSONResponse({"status": "ok", "unfinished_requests": self.service.num_unfinished})

    async def models(self, _: Request) -> Response:
        model = {"id": self.info.name, "object": "model", "created": self._created, "owned_by": "megatron"}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": self.info.max_length}]})

    async def tokenizer_info(self, _: Request) -> Response:
        tokenizer = self.info.tokenizer
        ids = {f"{role}_token": index for role, index in tokenizer.special_ids.items() if index >= 0}
        ids.setdefault("eos_token", tokenizer.eod)
        return JSONResponse({
            "tokenizer_class": tokenizer.tokenizer_type, "vocab_size": tokenizer.vocab_size,
            "model_max_length": self.info.max_length, "chat_template": tokenizer.chat_template,
            **{role: tokenizer.detokenize([index]) or None for role, index in ids.items()},
        })  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        return await self._in_thread(request, self._tokens)

    async def detokenize(self, request: Request) -> Response:
        return await self._in_thread(request, self._text)

    def _tokens(self, fields: Fields) -> dict[str, object]:
        check_model(fields, self.info)
        text, tokenizer = checked_type("prompt", fields.raw("prompt"), str), self.info.tokenizer
        special = fields.get("add_special_tokens", bool, True)
        fields.finish()
        ids = tokenizer.tokenize(text) if special else tokenizer.tokenize_sentences([text], False)[0].tolist()
        return {"tokens": ids, "count": len(ids), "max_model_len": self.info.max_length}

    def _text(self, fields: Fields) -> dict[str, object]:
        check_model(fields, self.info)
        ids = [checked_type("tokens", token, int) for token in checked_type("tokens", fields.raw("tokens"), list)]
        fields.finish()
        if len(ids) > MAX_DETOKENIZED:
            raise RequestError(f"tokens: are {len(ids)}, at most {MAX_DETOKENIZED} are allowed", "tokens")
        if not all(0 <= token < self.info.tokenizer.vocab_size for token in ids):
            raise RequestError("tokens: outside of the tokenizer's vocabulary", "tokens")
        return {"prompt": self.info.tokenizer.detokenize(ids)}

    async def _in_thread(self, request: Request, compute: Callable[[Fields], dict[str, object]]) -> Response:
        body = await self._body(request)
        return _response(await asyncio.to_thread(lambda: json_bytes(compute(Fields(body)))))

    # ---- generation

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat)

    async def megatron(self, request: Request) -> Response:
        try:
            answer = await self._read(request, read_megatron)
            texts = await self._texts(request, answer)
            return _response(await asyncio.to_thread(lambda: json_bytes(answer.megatron(texts))))
        except UserError as error:  # its client prints the key "message"
            return _error_response(error, {"message": str(error)})

    async def _answer(self, request: Request, read: Callable[[Fields, Model], Job]) -> Response:
        answer = await self._read(request, read)
        if not answer.job.stream:
            choices = await self._choices(request, answer)
            return _response(await asyncio.to_thread(answer.full, choices))
        updates = self._updates(answer)
        # errors of the first step still have a status
        first = await _unless_gone(request, anext(updates))
        return StreamingResponse(_events(answer, first, updates), media_type="text/event-stream")

    async def _read(self, request: Request, read: Callable[[Fields, Model], Job]) -> Answer:
        """Read a request in another thread: long texts take time to tokenize."""
        body = await self._body(request)
        return await asyncio.to_thread(lambda: Answer(read(Fields(body), self.info), self.info))

    async def _texts(self, request: Request, answer: Answer) -> list[str]:
        """Return the texts of all choices. A client that leaves cancels them."""
        texts = [""] * len(answer.choices)

        async def collect() -> None:
            async for choice, piece in self._updates(answer):
                texts[choice.index] += piece

        await _unless_gone(request, collect())
        return texts

    async def _choices(self, request: Request, answer: Answer) -> list[bytes]:
        """Return all choices as JSON. Each is written when it ends: log-probabilities of a large answer, millions of
        small objects at the same time, would leave memory in fragments that Python never returns."""
        texts, choices = [""] * len(answer.choices), [b""] * len(answer.choices)

        async def collect() -> None:
            async for choice, piece in self._updates(answer):
                texts[choice.index] += piece
                if choice.finish_reason is not None:
                    choices[choice.index] = await asyncio.to_thread(answer.encode, choice, texts[choice.index])

        await _unless_gone(request, collect())
        return choices

    async def _updates(self, answer: Answer) -> Updates:
        """Yield the new text of a choice after each of its tokens. Cancels unfinished requests at the end."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[Choice, Event]]()

        def listener(choice: Choice) -> Callable[[Event], None]:
            def listen(event: Event) -> None:
                with suppress(RuntimeError):  # the loop is closed: the server has ended
                    loop.call_soon_threadsafe(queue.put_nowait, (choice, event))

            return listen

        tickets = self.service.submit(answer.job.requests(), list(map(listener, answer.choices)))
        unfinished = len(tickets)
        try:
            while unfinished:
                choice, event = await queue.get()
                if event.error is not None:
                    raise event.error
                if choice.finish_reason is not None:  # tokens after a stop string
                    continue
                piece = choice.advance(event)
                if choice.finish_reason is not None:
                    unfinished -= 1
                    self.service.cancel([tickets[choice.index]])
                yield choice, piece
        finally:
            self.service.cancel(tickets)

    async def _body(self, request: Request) -> bytes:
        """Return the body. Raises RequestError beyond ``max_bytes``, or if the client is slow."""
        try:
            return await asyncio.wait_for(self._receive(request), BODY_SECONDS)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS} s"
            raise RequestError(message, status=408) from None

    async def _receive(self, request: Request) -> bytes:
        data = bytearray()
        try:
            async for part in request.stream():
                data += part
                self._num_reading += len(part)
                if len(data) > self.max_bytes:
                    raise RequestError(f"the body has more than {self.max_bytes} bytes", status=413)
                if self._num_reading > READING_BODIES * self.max_bytes:
                    raise Overloaded("too many bodies arrive at the same time: try again later")
            return bytes(data)
        finally:
            self._num_reading -= len(data)


async def _events(answer: Answer, first: tuple[Choice, str], updates: Updates) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer whose ``first`` update has been read."""

    def write(choice: Choice, piece: str) -> bytes:
        return _event(answer.chunk(choice, piece))

    try:
        for chunk in answer.first_chunks():
            yield _event(chunk)
        choice, piece = first
        while True:
            if choice.num_unreported > LARGE_SCORES:
                yield await asyncio.to_thread(write, choice, piece)
            elif piece or choice.finish_reason is not None:
                yield write(choice, piece)
            try:
                choice, piece = await anext(updates)
            except StopAsyncIteration:
                break
        if answer.job.include_usage:
            yield _event(answer.usage_chunk())
    except UserError as error:  # the status has been sent
        yield _event(_error(error).body())
    except Exception as error:
        logger.exception("an answer failed")
        yield _event(_internal(error).body())
    finally:
        await updates.aclose()
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, object]) -> bytes:
    return b"data: %b\n\n" % json_bytes(value)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of ``work``; cancel it and raise ClientDisconnect if the client leaves before."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, disconnect):
            future.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


def _error(error: UserError) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RequestFailed):
        return RequestError(str(error), status=500, code="logits_not_finite")
    status = 429 if isinstance(error, Overloaded) else 503 if isinstance(error, EngineFailed) else 400
    return RequestError(str(error), status=status)


def _internal(error: Exception) -> RequestError:
    return RequestError(f"internal error ({type(error).__name__}); the log of the server has more", status=500)


def _response(content: bytes, status: int = 200) -> Response:
    """Return an answer of JSON. After a large one unused memory is returned to the system."""
    task = BackgroundTask(_release_later) if len(content) > LARGE_ANSWER else None
    return Response(content, status, media_type="application/json", background=task)


async def _release_later() -> None:
    asyncio.get_running_loop().call_later(RELEASE_SECONDS, release_memory)


def _error_response(error: UserError, more: dict[str, object] | None = None) -> Response:
    answer = _error(error)
    return _response(json_bytes({**answer.body(), **(more or {})}), answer.status)


async def _failed(_: Request, error: UserError) -> Response:
    return _error_response(error)


async def _http_failed(request: Request, error: HTTPException) -> Response:
    return _error_response(
        RequestError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    )


async def _bug(_: Request, error: Exception) -> Response:
    return _error_response(_internal(error))


async def _disconnected(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=499)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket (port 0: any free one). Raises OSError."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def build_program(server: Server, token: str | None, max_connections: int = MAX_CONNECTIONS) -> Program:
    """Return uvicorn's server."""
    return Program(server.app(token), server.service, max_connections)
