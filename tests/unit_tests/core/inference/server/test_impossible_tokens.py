"""Tokens of probability 0 have a finite log-probability in every answer: JSON has no infinity."""

import json

import pytest
import torch

from tests.test_utils.lazy_packages import lazy_package

httpx = pytest.importorskip("httpx")
openai = lazy_package("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.test_utils.model_server import running_server, tiny_model, tiny_tokenizer  # noqa: E402

POSSIBLE = (65, 66, 67)
"""Tokens with a probability above 0."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    model = tiny_model(tokenizer.vocab_size)
    forward = model.forward

    def masked(*args, **kwargs):
        logits = forward(*args, **kwargs)
        possible = torch.isin(torch.arange(logits.shape[-1]), torch.tensor(POSSIBLE))
        return logits.masked_fill(~possible, -torch.inf)

    model.forward = masked
    with running_server(tokenizer, model=model) as (url, _):
        yield url


def floats(value):
    """All floats of an answer."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, float) else [number for part in parts for number in floats(part)]


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": [70, 66, 90], "echo": True, "logprobs": 20}),
    ("/v1/completions", {"prompt": [70, 66, 90], "echo": True, "logprobs": 20, "max_tokens": 0}),
    ("/v1/completions", {"prompt": "x", "logprobs": 20}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}),
    ("/api", {"prompts": ["hello"], "tokens_to_generate": 3, "logprobs": True}),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_impossible_tokens_have_the_log_probability_of_openai(server, path, body, stream):
    body = {**body, **({} if path == "/api" else {"max_tokens": 4, "stream": stream} | body)}
    answer = httpx.post(server + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line and not line.endswith("[DONE]")]
    values = [number for line in lines for number in floats(strict(line))]
    assert values.count(-9999.0) >= 2 and all(x == -9999.0 or -100 < x <= 0 for x in values)
