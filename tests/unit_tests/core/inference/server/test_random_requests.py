"""Random requests of every combination of fields, many at once, equal a definition from full forward passes."""

import asyncio
import json
import random
from codecs import getincrementaldecoder

import pytest
import torch

from tests.test_utils.lazy_packages import lazy_package

httpx = pytest.importorskip("httpx")
openai = lazy_package("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron.core.inference.sampling import Sampling, generate  # noqa: E402
from tests.test_utils.model_server import LENGTH, running_server, tiny_model, tiny_tokenizer  # noqa: E402

NUM_REQUESTS = 50


def random_body(rng):
    """(Path, body) of a request; every field is sometimes missing."""
    is_chat, stop = rng.random() < 0.4, [rng.choice(["e", "th", "a ", "é", "\n", "de"]) for _ in range(3)]
    body = {
        "temperature": rng.choice((0, 0.7, 1.0, 1.5)), "top_k": rng.choice((-1, 3, 5, 40)),
        "top_p": rng.choice((0.5, 1)), "seed": rng.randrange(1000), "n": rng.choice((1, 2, 3)),
        "stop": rng.choice((stop, stop[0], [])),
        "ignore_eos": rng.random() < 0.5, "max_tokens": rng.randrange(1, 28), "stream": True,
        "stream_options": {"include_usage": True}, "min_p": 0, "user": "someone",
    }  # fmt: skip
    if is_chat:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(4)}
        if rng.random() < 0.5:
            body["max_completion_tokens"] = rng.randrange(1, 28)
    else:
        body |= {"logprobs": rng.randrange(4), "echo": rng.random() < 0.5}
    always = ("temperature", "seed", "stream_options", "top_logprobs", "max_completion_tokens")
    body = {name: value for name, value in body.items() if name in always or rng.random() < 0.75}
    if "stream" not in body or rng.random() < 0.2:
        body.pop("stream_options")
    if "logprobs" not in body:
        body.pop("top_logprobs", None)
    text = "".join(rng.choice(["def ", "é", "中", "the ", "x", "😀"]) for _ in range(rng.randrange(1, 12)))
    if is_chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": rng.choice((text, [text, "a"]))}


def expected_texts(model, tokenizer, ids, body, number, limit):
    """(Text, finish reason, sampled tokens with the end token) of one choice, by ``generate`` and ``str.find``."""
    sampling = Sampling(
        temperature=body["temperature"], top_k=max(body.get("top_k", 0), 0), top_p=body.get("top_p", 1) % 1,
        seed=body["seed"] + number,
    )  # fmt: skip
    limit, ends = min(limit, LENGTH - len(ids)), () if body.get("ignore_eos") else (tokenizer.eod,)
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    tokens, text, context = [], "", tokenizer.detokenize(ids)
    for token in generate(model, ids, max_new_tokens=limit, max_sequence_length=LENGTH, sampling=sampling):
        if token in ends:
            return text, "stop", [*tokens, token]
        tokens.append(token)
        text = tokenizer.detokenize([*ids, *tokens])[len(context) :]
        # characters at the end whose bytes are not complete may still change
        complete = text if len(tokens) == limit else text.rstrip("\ufffd")
        if result := [complete.find(stop) for stop in stops if stop in complete]:
            return text[: min(result)], "stop", tokens
    return text, "length", tokens


def collect(response_text, is_stream):
    """({index: (text, finish reason, logprobs)}, usage) in an answer, or in the chunks of a stream."""
    choices, usage = {}, None
    bodies = [response_text]
    if is_stream:
        lines = [line for line in response_text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        bodies = [line.removeprefix("data: ") for line in lines[:-1]]
    for body in map(json.loads, bodies):
        usage = body.get("usage") or usage
        for choice in body["choices"]:
            text, reason, logprobs = choices.get(choice["index"], ("", None, {}))
            assert reason is None, "a chunk after the end"
            part = choice.get("delta") or choice.get("message") or {}
            new = choice["text"] if "text" in choice else part.get("content") or ""
            for key, values in (choice["logprobs"] or {}).items():
                logprobs = logprobs | {key: [*logprobs.get(key, []), *(values or [])]}
            choices[choice["index"]] = text + new, choice["finish_reason"], logprobs
    return choices, usage


def expected_offsets(tokenizer, tokens, length):
    """Number of characters that are complete before each token, at most the length of prompt and text."""
    decoder, offsets, index = getincrementaldecoder("utf-8")(errors="replace"), [], 0
    for token in tokens:
        if token == tokenizer.eod:  # it ends an incomplete character
            index += len(decoder.decode(b"", final=True))
        offsets.append(min(index, length))
        index += len(decoder.decode(tokenizer.token_bytes(token)))
    return offsets


def check_scores(model, tokenizer, ids, sampled, body, logprobs, is_chat, text):
    """Compare log-probabilities with one forward pass over prompt and text."""
    with torch.no_grad():
        row = torch.tensor([[*ids, *sampled]])
        rows = model(row, torch.arange(row.shape[1])[None])[0, :, : tokenizer.vocab_size].log_softmax(-1)
    if is_chat:
        values = [x["logprob"] for x in logprobs["content"]]
        assert [bytes(x["bytes"]) for x in logprobs["content"]] == list(map(tokenizer.token_bytes, sampled))
        assert {len(x["top_logprobs"]) for x in logprobs["content"]} == {body.get("top_logprobs", 0)}
        for x, best in zip(logprobs["content"], rows[len(ids) - 1 :].topk(3).values.tolist()):
            top = [item["logprob"] for item in x["top_logprobs"]]
            assert top == pytest.approx(best[: len(top)], abs=1e-4)
        first = len(ids)
    else:
        values, first = logprobs["token_logprobs"], 0 if body.get("echo") else len(ids)
        assert len({len(value) for value in logprobs.values()}) == 1
        prompt = "" if body.get("echo") else tokenizer.detokenize(ids)
        expected = expected_offsets(tokenizer, [*ids, *sampled], len(prompt + text))[len(ids) * bool(prompt) :]
        valid = (prompt + text + "\ufffd").index("\ufffd")  # invalid bytes are held back longer
        offsets, count = logprobs["text_offset"], sum(offset <= valid for offset in expected)
        assert offsets[:count] == expected[:count] and offsets == sorted(offsets), body
        if body.get("echo"):
            assert values.pop(0) is None
            first = 1
    everything = [*ids, *sampled]
    expected = [float(rows[n - 1, everything[n]]) for n in range(first, len(everything))]
    assert values == pytest.approx(expected, abs=1e-4)


def test_random_requests_at_once_equal_their_definition(tmp_path):
    tokenizer, rng = tiny_tokenizer(tmp_path), random.Random(11)
    model, requests = tiny_model(tokenizer.vocab_size), [random_body(rng) for _ in range(NUM_REQUESTS)]
    unlimited = {"messages": [{"role": "user", "content": "é"}], "temperature": 1, "seed": 5, "ignore_eos": True}
    requests.append(("/v1/chat/completions", unlimited))  # ends at the model's length

    async def send(url):
        limit = asyncio.Semaphore(5)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def post(path, body):
                async with limit:
                    return await client.post(path, json=body)

            return await asyncio.gather(*(post(path, body) for path, body in requests))

    with running_server(tokenizer, max_requests=200, pages=20) as (url, service):
        responses = asyncio.run(send(url))
        assert service.engine.scheduler.num_preemptions > 5
    reasons = set()
    for (path, body), response in zip(requests, responses):
        assert response.status_code == 200, (body, response.text)
        is_chat = path.startswith("/v1/chat")
        choices, usage = collect(response.text, "stream" in body)
        texts = [f"<user>{body['messages'][0]['content']}<assistant>"] if is_chat else body["prompt"]
        texts = [texts] if isinstance(texts, str) else texts
        count, num_sampled = body.get("n", 1), 0
        limit = body.get("max_completion_tokens", body.get("max_tokens", LENGTH if is_chat else 16))
        assert sorted(choices) == list(range(count * len(texts)))
        for index, (text, reason, logprobs) in choices.items():
            ids = tokenizer.tokenize(texts[index // count])
            expected, expected_reason, sampled = expected_texts(model, tokenizer, ids, body, index % count, limit)
            echo = texts[index // count] if body.get("echo") else ""
            assert (text, reason) == (echo + expected, expected_reason), body
            assert bool(logprobs) == ("logprobs" in body)
            if logprobs:
                check_scores(model, tokenizer, ids, sampled, body, logprobs, is_chat, text)
            num_sampled += len(sampled)
            reasons.add((is_chat, reason))
        if "stream" in body:
            assert ('"usage":null' in response.text) == ("stream_options" in body)
        if usage is None:
            assert "stream" in body and "stream_options" not in body
        else:
            num_prompt = sum(len(tokenizer.tokenize(text)) for text in texts)
            assert usage == {"prompt_tokens": num_prompt, "completion_tokens": num_sampled,
                             "total_tokens": num_prompt + num_sampled}  # fmt: skip
    assert len(reasons) == 4
