"""Malformed requests get 4xx in OpenAI's form, and long ones do not delay others."""

import json
import random
import threading

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron.core.inference.server import app, protocol  # noqa: E402
from megatron.core.tokenizers.huggingface import build_huggingface  # noqa: E402
from tests.test_utils.model_server import running_server, tiny_tokenizer, wait  # noqa: E402
from tests.test_utils.tiny_tokenizers import byte_fallback_bpe  # noqa: E402

JSON = {"Content-Type": "application/json"}
FIELDS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "temperature": 1, "top_p": 0.9, "top_k": 3, "n": 1, "stop": "x",
                        "seed": 1, "logprobs": 1, "echo": True, "stream": False, "stream_options": None, "suffix": "",
                        "logit_bias": {}, "ignore_eos": True, "user": "u", "model": "tiny", "best_of": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "top_logprobs": None,
                             "logprobs": True, "tools": [], "response_format": {"type": "text"}, "n": 1, "stop": None,
                             "max_completion_tokens": 2, "temperature": 0},
    "/tokenize": {"prompt": "a", "add_special_tokens": False},
    "/detokenize": {"tokens": [1, 2]},
    "/api": {"prompts": ["a"], "tokens_to_generate": 2, "logprobs": True, "top_k": 1, "random_seed": 3,
             "stop_token": 1},
}  # fmt: skip
NESTED = "[" * 500 + "]" * 500
WRONG = [
    "1", "-1", "0", "1.5", "1e308", "1e999", "-1e999", "NaN", "Infinity", str(10**30), str(-(10**30)), "1" * 5000,
    "9223372036854775807", "9223372036854775808", "true", "null", '""', '"a"', '"\\ud800"', '"\\u0000"',
    '"{{ 1 / 0 }}"',
    "[]", "[[]]", "{}", '{"a": 1}', '["a", 1]', '["\\ud800"]', "[1, 2.0]", "[true]", "[null]", "[-1]", NESTED,
    '{"a":' * 500 + "1" + "}" * 500, '[{"role": "user", "content": "\\udfff"}]',
    '[{"role": "\\ud800", "content": "a"}]', '[{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]',
    f'[{{"role": "user", "content": "a", "x": {NESTED}}}]', '[{"role": "user", "content": null}]',
    '{"include_usage": 3}', '"' + "a" * 9000 + '"',
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_malformed_requests_get_4xx_in_form_and_never_end_the_engine(tokenizer, caplog):
    rng, statuses = random.Random(11), []
    with running_server(tokenizer) as (url, service), httpx.Client(base_url=url, timeout=30) as http:
        for _ in range(400):
            path = rng.choice([*FIELDS])
            chosen = [name for name in FIELDS[path] if rng.random() < 0.7 or name in ("prompt", "messages")]
            fields = {name: json.dumps(FIELDS[path][name]) for name in chosen}
            for _ in range(rng.choice((0, 1, 1, 2))):
                name = rng.choice([*FIELDS[path]] * 3 + ["nonsense", "\\ud800", "\\u0000"])
                fields[name] = rng.choice(WRONG)
            text = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
            if rng.random() < 0.05:
                text = text[: rng.randrange(len(text))]
            body = text.encode() if rng.random() < 0.95 else text.encode() + b"\xff"
            answer = http.post(path, content=body, headers=JSON)
            statuses.append(answer.status_code)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (path, text[:300], answer.text)
            if answer.status_code == 200 and "stream" in fields and fields["stream"] == "true":
                assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text, text[:300]
            elif answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"] and error["type"] == "invalid_request_error" and set(error) >= {"param", "code"}
        assert http.get("/health").json()["status"] == "ok"
        wait(lambda: service.num_unfinished == 0)
    assert 50 < statuses.count(200) < 300 and not caplog.records


def test_an_unexpected_error_is_an_error_object(tokenizer, monkeypatch, caplog):
    def fail(*_):
        raise KeyError("bug")

    with running_server(tokenizer) as (url, _):
        monkeypatch.setattr(protocol.Model, "prompt_ids", fail)
        answer = httpx.post(url + "/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "KeyError" in answer.json()["error"]["message"]
        monkeypatch.undo()
        monkeypatch.setattr(app.Answer, "chunk", fail)
        text = httpx.post(url + "/v1/completions", json={"prompt": "a", "stream": True}).text
        error, finished = text.split("\n\n")[-3:-1]
        assert json.loads(error[6:])["error"]["type"] == "server_error" and finished == "data: [DONE]"


@pytest.mark.parametrize("kind", ["tokenize", "detokenize", "keys", "completions with echo and logprobs", "stream"])
def test_no_work_of_a_request_blocks_the_event_loop(tokenizer, monkeypatch, kind):
    """The event loop runs in the thread of no tokenizer call, JSON parser or answer."""
    threads = set()

    def record(owner, name):
        function = getattr(owner, name)

        def recorded(*args, **kwargs):
            threads.add(threading.current_thread().name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    long = "The quick brown fox " * 3
    completion = {"prompt": [long] * 8, "max_tokens": 1, "echo": True, "logprobs": 20}
    path, body = {
        "tokenize": ("/tokenize", {"prompt": long}),
        "detokenize": ("/detokenize", {"tokens": [5] * 2000}),
        "keys": ("/v1/completions", {f"k{n}": 1 for n in range(1000)}),
        "completions with echo and logprobs": ("/v1/completions", completion),
        "stream": ("/v1/completions", {**completion, "prompt": [[7] * 90], "stream": True}),
    }[kind]
    with running_server(tokenizer) as (url, _):
        record(app, "Fields")
        if kind in ("tokenize", "completions with echo and logprobs"):
            record(type(tokenizer), "tokenize")
        if kind == "detokenize":
            record(type(tokenizer), "detokenize")
        record(app.Choice, "_logprobs")
        assert httpx.post(url + path, json=body, timeout=30).status_code == (400 if kind == "keys" else 200)
    assert threads and all(name.startswith("server") for name in threads), threads


def test_special_tokens_are_added_as_the_fields_ask(tmp_path):
    tokenizer = build_huggingface(byte_fallback_bpe(tmp_path))
    with running_server(tokenizer) as (url, service), httpx.Client(base_url=url, timeout=30) as http:
        ids = [http.post("/tokenize", json={"prompt": "the cat", **more}).json()["tokens"]
               for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})]  # fmt: skip
        assert ids[0] == ids[1] == [tokenizer.bos, *ids[2]] == tokenizer.tokenize("the cat")
    for more, starts in (({}, []), ({"add_BOS": False}, []), ({"add_BOS": True}, [tokenizer.bos])):
        fields = protocol.Fields(json.dumps({"prompts": ["a"], **more}).encode())
        job = protocol.read_megatron(fields, protocol.Model("tiny", tokenizer, 96, 8))
        assert job.prompts == [[*starts, *tokenizer.tokenize("a")]]


def test_prompts_with_too_many_log_probabilities_are_rejected(tokenizer, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_PROMPT_SCORES", 100)
    monkeypatch.setattr(app, "MAX_DETOKENIZED", 10)
    with running_server(tokenizer) as (url, _):
        body = {"prompt": [[5] * 10] * 2, "max_tokens": 1, "echo": True, "logprobs": 4}
        assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        answer = httpx.post(url + "/v1/completions", json={**body, "logprobs": 5})
        assert answer.status_code == 400 and "120 log-probabilities" in answer.json()["error"]["message"]
        assert httpx.post(url + "/v1/completions", json={**body, "n": 2}).status_code == 400
        assert httpx.post(url + "/detokenize", json={"tokens": [5] * 10}).status_code == 200
        assert httpx.post(url + "/detokenize", json={"tokens": [5] * 11}).status_code == 400
