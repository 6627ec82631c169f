"""The server answers OpenAI's client, scores as a forward pass does, and survives wrong requests and lost clients."""

import json
import re
import threading
from http.client import HTTPConnection
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch

from tests.test_utils.lazy_packages import lazy_package

httpx = pytest.importorskip("httpx")
openai = lazy_package("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron.core.config.errors import UserError  # noqa: E402
from megatron.core.inference.engine import Engine  # noqa: E402
from megatron.core.inference.scheduler import Limits  # noqa: E402
from megatron.core.inference.server import app  # noqa: E402
from megatron.core.tokenizers.simple import NullTokenizer  # noqa: E402
from megatron.tools.serve import parse_command_line, serve  # noqa: E402
from tests.test_utils.model_server import LENGTH, running_server, tiny_model, tiny_tokenizer, wait  # noqa: E402

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(tokenizer):
    with running_server(tokenizer) as (url, service):
        yield url, service
        assert service.num_unfinished == 0
        wait(lambda: service.engine.pool.num_free == service.engine.pool.num_usable)
    assert service.engine.pool.num_free == service.engine.pool.num_usable


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server[0], timeout=30) as client:
        yield client


def post(http, path="/v1/completions", **values):
    return http.post(path, json=values)


def test_models_and_health_are_listed(client, http):
    assert [item.id for item in client.models.list()] == ["tiny"]
    assert http.get("/health").json()["status"] == "ok"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(**{**GREEDY, "model": "other"}, prompt="a")


def test_greedy_text_is_that_of_forward_passes(client, tokenizer):
    model, ids = tiny_model(tokenizer.vocab_size), tokenizer.tokenize("The quick brown")
    written = list(ids)
    for _ in range(12):
        logits = model(torch.tensor([written]), torch.arange(len(written))[None])[0, -1, : tokenizer.vocab_size]
        written.append(int(logits.argmax()))
    answer = client.completions.create(**GREEDY, prompt="The quick brown")
    text = tokenizer.detokenize(written)[len("The quick brown") :]
    assert answer.choices[0].text == text and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 12)
    assert client.completions.create(**GREEDY, prompt=ids, echo=True).choices[0].text == "The quick brown" + text


def test_every_form_of_prompt_gives_a_choice_per_text(client, tokenizer):
    ids = [tokenizer.tokenize(text) for text in ("one", "two")]
    texts = [[choice.text for choice in client.completions.create(**GREEDY, prompt=prompt).choices]
             for prompt in (["one", "two"], ids)]  # fmt: skip
    assert texts[0] == texts[1] and len(texts[0]) == 2
    answer = client.completions.create(model="tiny", prompt=["one", "two"], n=3, seed=5, max_tokens=6)
    assert [choice.index for choice in answer.choices] == list(range(6)) and len({x.text for x in answer.choices}) > 3
    repeated = client.completions.create(model="tiny", prompt="two", n=3, seed=5, max_tokens=6)
    assert [x.text for x in repeated.choices] == [x.text for x in answer.choices[3:]]


def test_a_stream_adds_up_to_the_full_answer(client):
    options = {"model": "tiny", "prompt": ["naïve café", "中文"], "seed": 3, "max_tokens": 40, "logprobs": 2}
    full = client.completions.create(**options)
    texts, ends, tokens, usage = ["", ""], {}, [[], []], None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.token_logprobs
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == [item.text for item in full.choices] and usage == full.usage
    assert tokens == [item.logprobs.token_logprobs for item in full.choices]
    assert ends == {item.index: item.finish_reason for item in full.choices}


def test_the_asynchronous_client_streams_many_requests_at_once(server):
    import asyncio

    async def stream(client, seed):
        options = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": seed, "max_tokens": 20}
        chunks = await client.chat.completions.create(**options, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        full = await client.chat.completions.create(**options)
        assert full.choices[0].message.content == text
        return text

    async def run():
        async with openai.AsyncOpenAI(base_url=server[0] + "/v1", api_key="none") as client:
            return await asyncio.gather(*(stream(client, seed) for seed in range(12)))

    assert len(set(asyncio.run(run()))) == 12


def test_chat_renders_the_template_and_reports_log_probabilities(client, tokenizer):
    parts = [{"type": "text", "text": "a"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(**GREEDY, messages=messages, logprobs=True, top_logprobs=3)
    prompt = "<system>Be brief.<user>a<assistant>"
    assert answer.choices[0].message.content == client.completions.create(**GREEDY, prompt=prompt).choices[0].text
    for item in answer.choices[0].logprobs.content:
        assert item.logprob == max(x.logprob for x in item.top_logprobs)
        assert bytes(item.bytes).decode(errors="backslashreplace") == item.token
    assert answer.usage.prompt_tokens == len(tokenizer.tokenize(prompt))


def test_text_ends_before_a_stop_string_in_every_mode(client):
    text = client.completions.create(**GREEDY, prompt="def").choices[0].text
    stop = text[4:7]
    expected = text[: text.find(stop)]
    answer = client.completions.create(**GREEDY, prompt="def", stop=["never", stop])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    chunks = list(client.completions.create(**GREEDY, prompt="def", stop=stop, stream=True))
    assert "".join(x.choices[0].text for x in chunks) == expected and chunks[-1].choices[0].finish_reason == "stop"


def test_echo_scores_equal_a_forward_pass_as_the_harness_sums_them(http, tokenizer):
    context, continuation = tokenizer.tokenize("The quick brown"), tokenizer.tokenize(" fox jumps")
    max_length = [1 + n % 300 for n in range(LENGTH)]
    for ids, length in ((context + continuation, len(context)), (max_length, 60)):
        form = {"prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
        [choice] = post(http, **form, model="tiny").json()["choices"]
        results = choice["logprobs"]
        assert results["token_logprobs"][0] is None and results["top_logprobs"][0] is None
        assert len(results["tokens"]) == len(ids) + 1 == len(results["text_offset"])
        with torch.no_grad():
            model = tiny_model(tokenizer.vocab_size)
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, :, : tokenizer.vocab_size]
        rows = logits.log_softmax(-1)[:-1]
        expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[length - 1 :].sum()
        assert abs(sum(results["token_logprobs"][length:-1]) - float(expected)) < 1e-4
        best = [max(result.values()) for result in results["top_logprobs"][1:-1]]
        torch.testing.assert_close(torch.tensor(best), rows.amax(-1), atol=1e-5, rtol=0)


def test_the_tokenizer_is_served(http, tokenizer):
    ids = post(http, "/tokenize", prompt="naïve", add_special_tokens=False).json()["tokens"]
    assert ids == tokenizer.tokenize("naïve") and post(http, "/detokenize", tokens=ids).json() == {"prompt": "naïve"}
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and "<assistant>" in info["chat_template"]
    assert tokenizer.tokenize(info["eos_token"]) == [tokenizer.eod]


def test_megatron_requests_are_answered(http, tokenizer):
    form = {"prompts": ["def main", "a"], "tokens_to_generate": 5, "logprobs": True, "top_k": 1, "random_seed": 4}
    answer = http.put("/api", json=form).json()
    assert len(answer["text"]) == 2
    for text, segments, logprobs, prompt in zip(*answer.values(), form["prompts"], strict=True):
        assert "".join(segments) == text and text.startswith(prompt) and len(logprobs) == len(segments) - 1
    for wrong in ({"tokens_to_generate": 0}, {"top_k": 2, "top_p": 0.5}, {"prompts": [""]}, {"beam_width": 2}):
        response = http.put("/api", json={"prompts": ["a"], **wrong})
        assert response.status_code == 400 and response.json()["message"], wrong


def test_answers_have_the_kinds_and_ids_of_openai(client):
    message, one = {"messages": [{"role": "user", "content": "a"}]}, {**GREEDY, "max_tokens": 1}
    texts = [client.completions.create(**one, prompt="a"), *client.completions.create(**one, prompt="a", stream=True)]
    assert {x.object for x in texts} == {"text_completion"} and all(x.id.startswith("cmpl-") for x in texts)
    chat = [client.chat.completions.create(**one, **message)]
    chunks = list(client.chat.completions.create(**one, **message, stream=True))
    assert chat[0].object == "chat.completion" and {x.object for x in chunks} == {"chat.completion.chunk"}
    assert all(x.id.startswith("chatcmpl-") for x in [*chat, *chunks])


@pytest.mark.parametrize("wrong", [
    {}, {"prompt": 3}, {"prompt": []}, {"prompt": ["a", 3]}, {"prompt": [[]]}, {"prompt": [-1]}, {"prompt": [10**30]},
    {"prompt": "\ud800"}, {"prompt": [True]}, {"prompt": ["a"] * 9}, {"prompt": "a " * 200}, {"prompt": "a", "n": 9},
    {"prompt": "a", "n": 0}, {"prompt": "a", "n": True}, {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "top_p": 0},
    {"prompt": "a", "max_tokens": 1.5}, {"prompt": "a", "max_tokens": 0}, {"prompt": "a", "temperature": -1},
    {"prompt": "a", "temperature": "hot"}, {"prompt": "a", "temperature": 10**400}, {"prompt": "a", "top_p": 1.5},
    {"prompt": "a", "top_k": -2}, {"prompt": "a", "seed": 2**63}, {"prompt": "a", "seed": -(2**63) - 1},
    {"prompt": "a", "logprobs": 21}, {"prompt": "a", "logprobs": -1}, {"prompt": "a", "logprobs": True},
    {"prompt": "a", "stop": [1]}, {"prompt": "a", "stop": ["x"] * 17}, {"prompt": "a", "stream_options": {"x": 1}},
    {"prompt": "a", "suffix": "b"}, {"prompt": "a", "logit_bias": {"3": 1}}, {"prompt": "a", "nonsense": 1},
    {"prompt": "a", "best_of": 9}, {"prompt": "a", "stream": "yes"}, {"prompt": "a", "model": 3},
])  # fmt: skip
def test_wrong_requests_get_400_with_a_reason(http, server, wrong):
    response = http.post("/v1/completions", content=json.dumps(wrong), headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"], response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    wait(lambda: server[1].num_unfinished == 0)


@pytest.mark.parametrize("prompt", [["a", [5]], [[5], "a"], [5, [6]]])
def test_prompts_of_several_kinds_are_named(http, prompt):
    header = {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=json.dumps({"prompt": prompt}), headers=header)
    assert response.status_code == 400
    reason = "prompt: must be text, tokens, a list of texts, or a list of lists of tokens; do not mix them"
    assert response.json()["error"]["message"] == reason


@pytest.mark.parametrize("messages", [
    None, [], "hi", [3], [{}], [{"role": "user"}], [{"role": 3, "content": "a"}], [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
])  # fmt: skip
def test_wrong_messages_get_400(http, messages):
    response = post(http, "/v1/chat/completions", messages=messages)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_bodies_that_are_no_json_and_wrong_paths_are_answered_in_json(http):
    header = {"Content-Type": "application/json"}
    for data in (b"", b"{", b"[]", b"\xff", b'{"prompt": NaN}', b"[" * 10_000, b'{"n": 1, "n": 2}'):
        response = http.post("/v1/completions", content=data, headers=header)
        assert response.status_code == 400 and "JSON" in response.json()["error"]["message"], data[:20]
    assert http.post("/v1/completions", content=b"x" * 30_000, headers=header).status_code == 413
    assert http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert http.get("/nope").status_code == 404 and "error" in http.get("/nope").json()
    assert http.get("/v1/completions").status_code == 405
    assert http.get("/health", headers={"Host": "evil.example:80"}).status_code == 403


def test_the_page_loads_nothing_from_elsewhere(http):
    page = http.get("/")
    assert "<html" in page.text and "http://" not in page.text and "https://" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


def test_the_page_has_labels_and_no_handlers_that_the_policy_blocks(http):
    from html.parser import HTMLParser

    labelled, controls, attributes = [], [], []

    class Page(HTMLParser):
        stack: list = []

        def handle_starttag(self, tag, pairs):
            values = dict(pairs)
            attributes.extend(values)
            if tag in ("input", "textarea"):
                controls.append(values["id"])
                labelled.append("label" in self.stack or "aria-label" in values)
            if tag in ("label", "script", "style"):
                self.stack.append(tag)

        def handle_endtag(self, tag):
            if tag in ("label", "script", "style"):
                assert self.stack.pop() == tag

    text = http.get("/").text
    Page().feed(text)
    assert controls == ["temperature", "top_p", "max_tokens", "key", "text"] and all(labelled)
    assert not [name for name in attributes if name.startswith("on")] and "style" not in attributes
    assert "innerHTML" not in text and "base model" in text and "prefers-color-scheme: dark" in text
    used = set(re.findall(r'\$\("(\w+)"\)', text))
    assert used <= set(re.findall(r'id="(\w+)"', text))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(server, stream):
    url, service = server
    pool, steps = service.engine.pool, []
    gate, step = threading.Event(), service.engine.step

    def slow_step():
        outputs = step()
        steps.append(pool.num_free)
        if len(steps) == 4:
            gate.wait(20)
        return outputs

    service.engine.step = slow_step
    try:
        body = {"prompt": "a", "max_tokens": 90, "n": 4, "ignore_eos": True, "stream": stream}
        if stream:
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=20) as response:
                lines = response.iter_lines()  # closes the connection when it is deleted
                next(lines)
                wait(lambda: len(steps) == 4)
        else:
            place = urlsplit(url)
            connection = HTTPConnection(place.hostname, place.port, timeout=20)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            wait(lambda: len(steps) == 4)
            connection.close()
        assert pool.num_free < pool.num_usable
        wait(lambda: len(service._cancelled) >= 4)
        gate.set()
        wait(lambda: service.num_unfinished == 0 and pool.num_free == pool.num_usable)
        assert len(steps) < 10
    finally:
        gate.set()
        del service.engine.step


def test_random_requests_and_lost_clients_leak_no_page(server):
    import asyncio
    import random

    url, service = server
    rng, statuses = random.Random(5), []

    async def one(client, number):
        body = {"prompt": ["a " * rng.randrange(1, 20)] * rng.choice((1, 2)), "n": rng.choice((1, 2)), "seed": number,
                "max_tokens": rng.randrange(1, 60), "stream": rng.random() < 0.5, "logprobs": rng.choice((None, 2)),
                "echo": rng.random() < 0.3, "stop": rng.choice((None, ["e", "a "])), "top_k": 20}  # fmt: skip
        try:
            request = client.post("/v1/completions", json=body)
            statuses.append((await asyncio.wait_for(request, rng.choice((0.01, 0.05, 0.2, 30)))).status_code)
        except asyncio.TimeoutError:
            statuses.append("left")

    async def run():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            limit = asyncio.Semaphore(12)

            async def limited(number):
                async with limit:
                    await one(client, number)

            await asyncio.gather(*map(limited, range(120)))

    asyncio.run(run())
    assert {200, "left"} <= set(statuses) <= {200, 429, "left"}
    wait(lambda: service.num_unfinished == 0)
    wait(lambda: service.engine.pool.num_free == service.engine.pool.num_usable)  # freed before the next step


def test_a_full_queue_gets_429_and_recovers(server):
    url, service = server
    gate, step = threading.Event(), service.engine.step

    def waiting_step():
        gate.wait(20)
        return step()

    service.engine.step = waiting_step
    body = {"prompt": "a", "max_tokens": 2, "n": 8}
    answers = []
    try:
        threads = [threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/completions", json=body)))
                   for _ in range(2)]  # fmt: skip
        for thread in threads:
            thread.start()
        wait(lambda: service.num_unfinished == 16)
        refused = httpx.post(url + "/v1/completions", json=body)
        assert refused.status_code == 429 and "try again later" in refused.json()["error"]["message"]
    finally:
        gate.set()
        del service.engine.step
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert httpx.post(url + "/v1/completions", json=body).status_code == 200


def test_a_failed_engine_answers_503(tokenizer, caplog):
    with running_server(tokenizer) as (url, service):

        def fail():
            raise RuntimeError("no memory")

        service.engine.step = fail
        response = httpx.post(url + "/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503 and "no memory" in response.json()["error"]["message"]
        assert httpx.get(url + "/health").status_code == 503
        assert service.failure.is_fault and httpx.post(url + "/v1/completions", json={"prompt": "a"}).status_code == 503


def test_a_token_protects_all_but_page_and_health():
    with running_server(NullTokenizer(50), token="secret") as (url, _):
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert httpx.get(url + "/").status_code == 200 == httpx.get(url + "/health").status_code
        messages = [{"role": "user", "content": "a"}]
        client = openai.OpenAI(base_url=url + "/v1", api_key="secret")
        with client, pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="tiny", messages=messages)


@pytest.mark.parametrize(("flags", "word"), [
    ("--host 0.0.0.0", "--token"), ("--host example.org", "--token"), ("--port 70000", "--port"),
    ("--max-requests 0", "--max-requests"), ("--host 0.0.0.0 --token=", "--token"), ("--token a\u00e9", "--token"),
    ("--token a --token-file b", "--token-file"), ("--token-file /nonexistent", "--token-file /nonexistent"),
    ("--watchdog-timeout-seconds nan", "--watchdog-timeout-seconds nan"),
    ("--watchdog-timeout-seconds -1", "must be 0"),
])  # fmt: skip
def test_wrong_flags_are_named(flags, word):
    with pytest.raises(UserError, match=word):
        parse_command_line(["--load", "x", *flags.split()])
    assert parse_command_line(["--load", "x", "--host", "::1"]).host == "::1"


def test_the_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text("sk-from_file/1\n")
    base = ["--load", "x", "--host", "0.0.0.0"]
    assert parse_command_line([*base, "--token-file", str(file)]).token == "sk-from_file/1"
    monkeypatch.setenv("MEGATRON_SERVE_TOKEN", "from-variable")
    assert parse_command_line(base).token == "from-variable"
    assert parse_command_line([*base, "--token-file", str(file)]).token == "sk-from_file/1"
    for text in ("", " \n", "two words", "\u00e9", "a\0"):
        file.write_text(text)
        with pytest.raises(UserError, match="--token-file .*token"):
            parse_command_line([*base, "--token-file", str(file)])
    monkeypatch.setenv("MEGATRON_SERVE_TOKEN", "")
    with pytest.raises(UserError, match="MEGATRON_SERVE_TOKEN"):
        parse_command_line(base)


def test_graphs_are_recorded_before_the_server_takes_requests(tokenizer, monkeypatch, capsys):
    engine = Engine(tiny_model(tokenizer.vocab_size), Limits(LENGTH, 64, 2), num_pages=20, page_size=8)
    trained = SimpleNamespace(tokenizer=tokenizer, image_loader=None)
    program = SimpleNamespace(run=lambda sockets: None)
    args = parse_command_line(["--load", "mine", "--port", "0"])
    monkeypatch.setattr(app, "build_program", lambda server, token: program)
    for count in (5, 0):
        monkeypatch.setattr(engine, "record_graphs", lambda count=count: count)
        assert serve(engine, trained, args) == 0
        *recorded, line = capsys.readouterr().out.splitlines()
        assert line.startswith("serving mine on http") and len(recorded) == bool(count)
        assert all(re.fullmatch(r"recorded 5 CUDA graphs in \d+\.\d s", item) for item in recorded)
