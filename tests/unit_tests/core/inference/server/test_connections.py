"""Idle, slow and broken clients do not keep others from the server, and a signal ends it with answers in form."""

import contextlib
import json
import logging
import random
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.test_utils.lazy_packages import lazy_package

httpx = pytest.importorskip("httpx")
openai = lazy_package("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron.core.inference.server import app, connections  # noqa: E402
from megatron.core.tokenizers.simple import NullTokenizer  # noqa: E402
from tests.test_utils.model_server import running_server, tiny_tokenizer, wait  # noqa: E402

JSON = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def connect(url, data=b""):
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=20)
    client.sendall(data)
    return client


def is_closed(client, seconds):
    """Whether the server closes ``client`` within this time, after what it sends."""
    client.settimeout(seconds)
    try:
        while client.recv(4096):
            pass
        return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def read_answer(client):
    """Return the status and JSON of an answer of a connection that then closes."""
    data = b""
    while part := client.recv(4096):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("beginning", [
    b"", b"GET /health HTTP/1.1\r\nHo", b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Content-Length: 99\r\n\r\n{",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
], ids=["idle", "half a header", "half a body", "idle after an answer"])  # fmt: skip
def test_waiting_connections_beyond_the_limit_are_closed_and_others_are_answered(tokenizer, beginning):
    with running_server(tokenizer, max_connections=10) as (url, _):
        clients = []
        for _ in range(30):
            clients.append(connect(url, beginning))
            if beginning.endswith(b"\r\n\r\n"):  # idle only after its answer
                assert clients[-1].recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(0.2)
        began = time.monotonic()
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert time.monotonic() - began < 10
        assert [is_closed(client, 5) for client in clients[:20]] == [True] * 20
        assert not is_closed(clients[-1], 0.1)


def test_connections_with_requests_are_never_closed_for_new_ones(tokenizer):
    with running_server(tokenizer, max_connections=3) as (url, service):
        gate, step = threading.Event(), service.engine.step
        service.engine.step = lambda: gate.wait(20) and step()
        body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
        request = b"POST /v1/completions HTTP/1.1\r\n%bConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        busy = [connect(url, request % (JSON, len(body), body)) for _ in range(3)]
        wait(lambda: service.num_unfinished == 3)
        status, refused = read_answer(connect(url))
        assert status == 503 and "3 connections" in refused["error"]["message"]
        gate.set()
        assert [read_answer(client)[0] for client in busy] == [200] * 3
        assert httpx.get(url + "/health").status_code == 200


def test_answers_do_not_wait_for_acknowledgments(tokenizer):
    with running_server(tokenizer) as (url, _), httpx.Client(base_url=url) as http:
        seconds = []
        for _ in range(15):
            began = time.monotonic()
            http.get("/health")
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 0.02, "a delayed acknowledgment takes 0.04 s"


def test_every_client_has_a_deadline(tokenizer, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.5)
    with running_server(tokenizer) as (url, service):
        head = b"GET /health HTTP/1.1\r\n"
        idle = [connect(url), connect(url, head), connect(url, head + JSON + b"\r\n")]
        slow = connect(url, b"POST /tokenize HTTP/1.1\r\n%bContent-Length: 99\r\n\r\n{" % JSON)
        for _ in range(4):  # bytes do not prolong the time
            time.sleep(0.2)
            idle[1].sendall(b"A: b\r\n") if not is_closed(idle[1], 0.01) else None
        assert [is_closed(client, 2) for client in idle] == [True] * 3
        status = slow.recv(4096).split()[1]
        assert status == b"408" and is_closed(slow, 2)
        answer = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 60, "ignore_eos": True})
        assert answer.status_code == 200, "an answer may take longer"


def test_a_client_that_does_not_read_loses_its_connection(tokenizer, monkeypatch):
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.5)
    with running_server(tokenizer, max_bytes=20_000_000) as (url, service):
        body = json.dumps({"prompt": "a " * 5_000_000}).encode()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(b"POST /tokenize HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (JSON, len(body)) + body)
        state = service.program.server_state
        wait(lambda: state.connections)
        wait(lambda: not state.connections, 30)


def test_the_token_is_checked_before_the_body_arrives():
    with running_server(NullTokenizer(50), token="secret") as (url, _):
        head = b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: 4000000\r\n\r\n" % JSON
        assert connect(url, head).recv(4096).startswith(b"HTTP/1.1 401")


def test_bodies_that_arrive_at_the_same_time_have_a_limit(tokenizer, monkeypatch):
    monkeypatch.setattr(app, "READING_BODIES", 2)
    with running_server(tokenizer) as (url, _):
        head = b"POST /tokenize HTTP/1.1\r\n%bConnection: close\r\nContent-Length: 20000\r\n\r\n" % JSON
        clients = [connect(url, head + b" " * 15_000) for _ in range(2)]
        time.sleep(0.2)
        status, answer = read_answer(connect(url, head + b" " * 15_000))
        assert status == 429 and "try again later" in answer["error"]["message"]
        clients[0].close()
        assert httpx.post(url + "/tokenize", json={"prompt": "a"}).status_code == 200


def test_data_that_is_not_http_gets_an_error_object(tokenizer, caplog):
    rng = random.Random(3)
    with running_server(tokenizer) as (url, _):
        status, answer = read_answer(connect(url, b"\x16\x03\x01 hello\r\n\r\n"))
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
        good = b"POST /v1/completions HTTP/1.1\r\n" + JSON + b'Content-Length: 29\r\n\r\n{"prompt":"a","max_tokens":60}'
        for _ in range(150):
            data = bytearray(good)
            for _ in range(rng.choice((1, 3, 30))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            client = connect(url, bytes(data) + rng.choice((b"", b"\0\0garbage\r\n\r\n", good)))
            if rng.random() < 0.5:
                client.settimeout(0.02)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    client.recv(100)
            client.close()
        assert httpx.get(url + "/health").status_code == 200
    assert "Traceback" not in caplog.text and len(caplog.records) <= 2 * connections.MAX_RECORDS


def test_logs_have_few_records_per_minute(monkeypatch):
    log, records = logging.getLogger("asyncio"), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log.addHandler(handler)
    now = [0.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    try:
        with connections.limited_logs():
            for _ in range(1000):
                log.error("no descriptors")
            now[0] = 61.0
            log.error("later")
        log.error("outside")
    finally:
        log.removeHandler(handler)
    assert records == ["no descriptors"] * 20 + ["[980 messages were dropped] later", "outside"]


@pytest.mark.parametrize("count", [1, 20])
def test_no_dropped_log_record_is_reported_if_none_was(monkeypatch, count):
    limit, now = connections.LimitedLog(), [0.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    limit._begin = 0.0
    record = logging.makeLogRecord({"msg": "text"})
    assert all(limit.filter(record) for _ in range(count))
    now[0] = 61.0
    assert limit.filter(record) and record.msg == "text"


def test_the_guide_names_the_deadlines():
    guide = (Path(__file__).resolve().parents[5] / "docs/guides/serving.md").read_text()
    assert f"requests have {connections.GRACE_SECONDS} s to finish" in guide
    assert f"the process ends with code 1 after {connections.LINGER_SECONDS} s" in guide


def test_requests_in_progress_are_answered_after_one_signal(tokenizer):
    with running_server(tokenizer) as (url, service):
        gate, step, answers = threading.Event(), service.engine.step, []
        service.engine.step = lambda: gate.wait(20) and step()
        body = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/completions", json=body)))
        thread.start()
        wait(lambda: service.num_unfinished == 1)
        service.program.handle_exit(15, None)
        time.sleep(0.3)
        gate.set()
        thread.join(20)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(("soft", "hard", "expected"), [(1024, 1024, 768), (256, 10**6, 4096), (64, 64, 40)])
def test_connections_fit_the_descriptors_of_the_process(monkeypatch, soft, hard, expected):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: limits.append(values))
    count, backlog = connections.connection_limits()
    raised = limits[0][0] if limits else soft
    assert count == expected and count + 3 * backlog + raised // 16 <= raised and raised == min(hard, 8192)


@pytest.mark.parametrize("again", [False, True])
def test_open_requests_get_errors_in_form_when_the_server_ends(tokenizer, monkeypatch, caplog, again):
    monkeypatch.setattr(connections, "GRACE_SECONDS", 60 if again else 0.3)
    with running_server(tokenizer) as (url, service):
        step = service.engine.step
        service.engine.step = lambda: time.sleep(0.3) or step()
        answers = {}

        def ask(name, **more):
            body = {"prompt": "a", "max_tokens": 80, "ignore_eos": True, **more}
            answers[name] = httpx.post(url + "/v1/completions", json=body, timeout=30)

        threads = [threading.Thread(target=ask, args=("full",)),
                   threading.Thread(target=ask, args=("stream",), kwargs={"stream": True, "n": 2})]  # fmt: skip
        for thread in threads:
            thread.start()
        wait(lambda: service.num_unfinished == 3)
        time.sleep(0.7)
        half = connect(url, b"POST /tokenize HTTP/1.1\r\n%bContent-Length: 99\r\n\r\n{" % JSON)
        # one that is accepted during the shutdown stays open until the graceful shutdown times out
        wait(lambda: len(service.program.server_state.connections) == 3)
        began = time.monotonic()
        service.program.handle_exit(15, None)
        if again:
            service.program.handle_exit(2, None)
        for thread in threads:
            thread.join(20)
        assert is_closed(half, 10) and time.monotonic() - began < 20
    assert answers["full"].status_code == 503
    assert "the server stops" in answers["full"].json()["error"]["message"]
    *_, error, finished, end = answers["stream"].text.split("\n\n")
    assert (finished, end) == ("data: [DONE]", "")
    assert "the server stops" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert "Traceback" not in caplog.text and not caplog.records


def test_answers_while_the_server_ends_close_their_connection(tokenizer):
    """A client must not send its next request on a connection that ends."""
    with running_server(tokenizer) as (url, service):
        gate, step = threading.Event(), service.engine.step
        service.engine.step = lambda: gate.wait(20) and step()
        request = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        body, stream = json.dumps(request).encode(), json.dumps({**request, "stream": True}).encode()
        clients = []
        for content in (body, stream, b'{"prompt": 3}'):
            head = b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (JSON, len(content))
            clients.append(connect(url, head + content))
        wait(lambda: service.num_unfinished == 2)
        before = receive(clients[2], b"\r\n\r\n")
        service.program.handle_exit(15, None)
        wait(lambda: not service.program.servers or not service.program.servers[0].is_serving())
        time.sleep(0.3)
        gate.set()
        answers = [receive(client, None) for client in clients[:2]]
    assert before.startswith(b"HTTP/1.1 400") and b"connection: close" not in before.lower()
    for answer in answers:
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and head.lower().count(b"connection: close") == 1, head
        assert b'"finish_reason":"length"' in content


def receive(client, end):
    """Return the data until ``end``, or until the server closes the connection."""
    data = b""
    while (end is None or end not in data) and (part := client.recv(4096)):
        data += part
    return data


def test_a_failed_engine_ends_the_program_after_its_answers(tokenizer, monkeypatch):
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.5)
    with running_server(tokenizer) as (url, service):

        def fail():
            raise RuntimeError("no memory")

        service.engine.step = fail
        response = httpx.post(url + "/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503 and "no memory" in response.json()["error"]["message"]
        assert httpx.get(url + "/health").status_code == 503
        wait(lambda: service.program.should_exit or not service.program.server_state.connections and is_refused(url), 5)


def is_refused(url):
    try:
        connect(url).close()
    except ConnectionError:
        return True
    return False
