"""HTTP server with OpenAI's interface: the only file that imports Starlette and uvicorn (``pip install
'megatron-pretraining[serve]'``). Handlers run in uvicorn's event loop, the engine in its own thread."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.core.config.errors import UserError
from megatron.core.inference.server.answers import Answer, Choice
from megatron.core.inference.server.fields import Fields, RequestError, checked_type
from megatron.core.inference.server.protocol import Job, Served, check_model, read_chat, read_completion, read_megatron
from megatron.core.inference.server.service import EngineFailed, EngineService, Event, Overloaded

PAGE = Path(__file__).with_name("chat.html")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN_PATHS = ("/", "/health")
"""Paths that need no token."""
GRACE = 5
"""Seconds that requests in progress have to finish after a signal."""
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
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return RequestError("a valid token is required: Authorization: Bearer TOKEN", status=401)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method in ("POST", "PUT") and media != "application/json":
            return RequestError("the header Content-Type must be application/json", status=415)
        return None


class Server:
    """Routes of the server."""

    def __init__(self, service: EngineService, served: Served, max_bytes: int) -> None:
        self.service, self.served, self.max_bytes = service, served, max_bytes
        self._created = int(time.time())

    def app(self, token: str | None) -> Starlette:
        """Return the application; its lifespan starts and stops the engine's thread."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
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
        handlers: dict[Any, Any] = {UserError: _failed, HTTPException: _http_failed, ClientDisconnect: _gone}
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
        app.add_middleware(Guard, token=token)
        return app

    # ---- small answers

    async def page(self, _: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": policy})

    async def health(self, _: Request) -> Response:
        if self.service.failure is not None:
            return _error_response(self.service.failure)
        return JSONResponse({"status": "ok", "unfinished_requests": self.service.num_unfinished})

    async def models(self, _: Request) -> Response:
        model = {"id": self.served.name, "object": "model", "created": self._created, "owned_by": "megatron"}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": self.served.max_length}]})

    async def tokenizer_info(self, _: Request) -> Response:
        tokenizer = self.served.tokenizer
        ids = {f"{role}_token": index for role, index in tokenizer.special_ids.items() if index >= 0}
        ids.setdefault("eos_token", tokenizer.eod)
        return JSONResponse({
            "tokenizer_class": tokenizer.tokenizer_type, "vocab_size": tokenizer.vocab_size,
            "model_max_length": self.served.max_length, "chat_template": tokenizer.chat_template,
            **{role: tokenizer.detokenize([index]) or None for role, index in ids.items()},
        })  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        fields = Fields(await self._body(request))
        check_model(fields, self.served)
        text, tokenizer = checked_type("prompt", fields.raw("prompt"), str), self.served.tokenizer
        special = fields.get("add_special_tokens", bool, True)
        fields.finish({}, ())
        ids = tokenizer.tokenize(text) if special else tokenizer.tokenize_sentences([text], False)[0].tolist()
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.served.max_length})

    async def detokenize(self, request: Request) -> Response:
        fields = Fields(await self._body(request))
        check_model(fields, self.served)
        ids = [checked_type("tokens", each, int) for each in checked_type("tokens", fields.raw("tokens"), list)]
        fields.finish({}, ())
        if not all(0 <= each < self.served.tokenizer.vocab_size for each in ids):
            raise RequestError("tokens: outside of the tokenizer's vocabulary", "tokens")
        return JSONResponse({"prompt": self.served.tokenizer.detokenize(ids)})

    # ---- generation

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat)

    async def megatron(self, request: Request) -> Response:
        try:
            answer = await self._read(request, read_megatron)
            return JSONResponse(answer.megatron(await self._texts(request, answer)))
        except UserError as error:  # its client prints the key "message"
            return _error_response(error, {"message": str(error)})

    async def _answer(self, request: Request, read: Callable[[Fields, Served], Job]) -> Response:
        answer = await self._read(request, read)
        if not answer.job.stream:
            return JSONResponse(answer.full(await self._texts(request, answer)))
        updates = self._updates(answer)
        # errors of the first step still have a status
        first = await _unless_gone(request, anext(updates))
        return StreamingResponse(_events(answer, first, updates), media_type="text/event-stream")

    async def _read(self, request: Request, read: Callable[[Fields, Served], Job]) -> Answer:
        """Read a request in another thread: long texts take time to tokenize."""
        fields = Fields(await self._body(request))
        return Answer(await asyncio.to_thread(read, fields, self.served), self.served)

    async def _texts(self, request: Request, answer: Answer) -> list[str]:
        """Return the texts of all choices. A client that leaves cancels them."""
        texts = [""] * len(answer.choices)

        async def collect() -> None:
            async for choice, piece in self._updates(answer):
                texts[choice.index] += piece

        await _unless_gone(request, collect())
        return texts

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
        """Return the body. Raises RequestError beyond ``max_bytes``."""
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self.max_bytes:
                raise RequestError(f"the body has more than {self.max_bytes} bytes", status=413)
        return bytes(data)


async def _events(answer: Answer, first: tuple[Choice, str], updates: Updates) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer whose ``first`` update has been read."""

    def data(value: object) -> str:
        return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

    try:
        for chunk in answer.first_chunks():
            yield data(chunk)
        choice, piece = first
        while True:
            if piece or choice.finish_reason is not None:
                yield data(answer.chunk(choice, piece))
            try:
                choice, piece = await anext(updates)
            except StopAsyncIteration:
                break
        if answer.job.include_usage:
            yield data(answer.usage_chunk())
        yield "data: [DONE]\n\n"
    except UserError as error:  # the status has been sent
        yield data(_error(error).body())
    finally:
        await updates.aclose()


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of ``work``; cancel it and raise ClientDisconnect if the client leaves before."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _error(error: UserError) -> RequestError:
    """Return ``error`` with its HTTP status."""
    if isinstance(error, RequestError):
        return error
    status = 429 if isinstance(error, Overloaded) else 503 if isinstance(error, EngineFailed) else 400
    return RequestError(str(error), status=status)


def _error_response(error: UserError, more: dict[str, object] | None = None) -> Response:
    answer = _error(error)
    return JSONResponse({**answer.body(), **(more or {})}, status_code=answer.status)


async def _failed(_: Request, error: UserError) -> Response:
    return _error_response(error)


async def _http_failed(request: Request, error: HTTPException) -> Response:
    return _error_response(
        RequestError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    )


async def _gone(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=499)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket (port 0: any free one). Raises OSError."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def build_program(server: Server, token: str | None) -> uvicorn.Server:
    """Return uvicorn's server: ``run(sockets=[...])`` serves until a signal, or until ``should_exit`` is set."""
    config = uvicorn.Config(server.app(token), log_level="warning", lifespan="on", timeout_graceful_shutdown=GRACE)
    return uvicorn.Server(config)
