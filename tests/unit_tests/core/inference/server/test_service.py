"""A request that cannot be answered gets an error, and others continue; an engine without progress ends the server."""

import json
import threading
import time

import pytest
import torch

from tests.test_utils.lazy_packages import lazy_package

httpx = pytest.importorskip("httpx")
openai = lazy_package("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron.core.inference.server import connections, service  # noqa: E402
from tests.test_utils.model_server import running_server, tiny_model, tiny_tokenizer, wait  # noqa: E402

BAD = 90
"""Token with NaN in its embedding."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def damaged(tokenizer):
    model = tiny_model(tokenizer.vocab_size)
    model.embedding.word_embeddings.weight.data[BAD] = torch.nan
    with running_server(tokenizer, model=model) as (url, server):
        yield url, server


def post(url, **body):
    return httpx.post(url + "/v1/completions", json={"temperature": 0, "max_tokens": 8, **body}, timeout=30)


def test_a_request_without_finite_logits_gets_an_error_and_the_others_their_texts(damaged, tokenizer):
    url, server = damaged
    with running_server(tokenizer) as (healthy_url, _):
        texts = [post(healthy_url, prompt=prompt).json()["choices"][0]["text"] for prompt in ("Once upon", "b")]
    expected = dict(zip(("Once upon", "b"), texts))
    gate, step = threading.Event(), server.engine.step
    server.engine.step = lambda: gate.wait(20) and step()
    bad = [BAD, *range(5, 25)]
    requests = [
        {"prompt": "Once upon"}, {"prompt": bad}, {"prompt": bad, "n": 3, "temperature": 1}, {"prompt": "b", "n": 2},
        {"prompt": bad, "echo": True, "logprobs": 3}, {"prompt": [[5, 6], bad], "stream": True},
        {"prompt": "Once upon", "stream": True}, {"prompt": bad, "stream": True},
    ]  # fmt: skip
    answers = [None] * len(requests)
    threads = [threading.Thread(target=lambda n=n: answers.__setitem__(n, post(url, **requests[n]))) for n in range(8)]
    for thread in threads:
        thread.start()
    wait(lambda: server.num_unfinished == 12)
    gate.set()
    for thread in threads:
        thread.join()
    for request, answer in zip(requests, answers):
        if isinstance(request["prompt"], str):
            if request.get("stream"):
                chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
                assert "".join(x["choices"][0]["text"] for x in chunks) == expected[request["prompt"]]
            else:
                results = [choice["text"] for choice in answer.json()["choices"]]
                assert results == [expected[request["prompt"]]] * request.get("n", 1)
            continue
        if answer.status_code == 200:  # a stream that began with the text for another prompt
            *_, last, finished, _ = answer.text.split("\n\n")
            assert request["stream"] and finished == "data: [DONE]"
            error = json.loads(last[6:])["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert error["code"] == "logits_not_finite" and "NaN or infinite" in error["message"]
    for _ in range(2):  # freed pages with NaN are used again, cached ones are not
        assert post(url, prompt="Once upon").json()["choices"][0]["text"] == expected["Once upon"]
        assert post(url, prompt=bad).status_code == 500
    assert httpx.get(url + "/health").json() == {"status": "ok", "unfinished_requests": 0}
    assert server.engine.pool.num_free == server.engine.pool.num_usable


def test_an_engine_without_progress_has_failed(tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(connections, "LINGER_SECONDS", 30)
    monkeypatch.setattr(service, "JOIN_SECONDS", 0.2)
    with running_server(tokenizer, limit=1.5) as (url, server):
        assert post(url, prompt="a").status_code == 200
        time.sleep(2.0)
        assert httpx.get(url + "/health").status_code == 200, "an idle engine shows signs of life"
        gate, step = threading.Event(), server.engine.step
        server.engine.step = lambda: gate.wait(30) and step()
        began = time.monotonic()
        answer = post(url, prompt="a", n=3)
        assert answer.status_code == 503 and 1.0 < time.monotonic() - began < 20
        for reply in (answer, httpx.get(url + "/health"), post(url, prompt="b")):
            assert reply.status_code == 503 and "no progress since 1.5 s" in reply.json()["error"]["message"]
        assert server.num_unfinished == 0 and server.failure.is_fault
        gate.set()
    assert "Traceback" not in caplog.text


def test_a_frozen_rank_is_noticed_while_no_request_runs(tokenizer):
    with running_server(tokenizer, limit=0.6) as (url, server):
        gate = threading.Event()
        server.engine.keep_alive = lambda: gate.wait(30)
        wait(lambda: httpx.get(url + "/health").status_code == 503, 20)
        gate.set()


def test_cancelled_requests_are_not_counted_during_a_step(tokenizer):
    with running_server(tokenizer, max_requests=4) as (url, server):
        gate, step = threading.Event(), server.engine.step
        server.engine.step = lambda: gate.wait(30) and step()
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + "/v1/completions", json={"prompt": "a", "n": 4}, timeout=0.3)
            wait(lambda: server.num_unfinished == 0)
        gate.set()
        assert post(url, prompt="a", n=4).status_code == 200
        wait(lambda: server.engine.pool.num_free == server.engine.pool.num_usable)


def test_a_server_stops_within_seconds_during_an_endless_step(tokenizer, monkeypatch):
    monkeypatch.setattr(connections, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(service, "JOIN_SECONDS", 0.3)
    gate = threading.Event()
    with running_server(tokenizer) as (url, server):
        server.engine.step = lambda: gate.wait(30) and []
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "/v1/completions", json={"prompt": "a"}, timeout=0.3)
        began = time.monotonic()
    assert time.monotonic() - began < 20 and server.failure.is_fault and "did not end its step" in str(server.failure)
    gate.set()
