"""Every field of OpenAI's request types has its effect, or is rejected by name, or is documented as ignored."""

import json
import math
import random
import typing
from itertools import pairwise

import pytest

from tests.test_utils.lazy_packages import lazy_package

httpx = pytest.importorskip("httpx")
openai = lazy_package("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron.core.inference.server import request_fields  # noqa: E402
from tests.test_utils.chat_templates import TOOL  # noqa: E402
from tests.test_utils.model_server import running_server, tiny_tokenizer  # noqa: E402

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
OBFUSCATION = {"include_obfuscation": False}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    with (
        running_server(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def type_fields(path):
    """Names of all fields of the ``openai`` package's request types."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    module = completion_create_params if path == COMPLETIONS else chat_create_params
    kinds = [module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming]
    return {name for kind in kinds for name in typing.get_type_hints(kind)}


@pytest.mark.parametrize(("path", "rules"), [(COMPLETIONS, request_fields.COMPLETION), (CHAT, request_fields.CHAT)])
def test_the_table_lists_the_fields_of_the_openai_package(path, rules):
    assert type_fields(path) - set(rules) == set(), "decide what the server does with these fields"
    assert set(rules) - type_fields(path) == set(), "these belong to another table"


# Valid values by OpenAI's documentation, and whether this server must reject them.
TOOL_NAMED = {"type": "function", "function": {"name": "f"}}
VALUES = {
    COMPLETIONS: {
        "best_of": [(1, False), (3, False), (None, False)], "echo": [(True, False), (False, False)],
        "frequency_penalty": [(0, False), (0.0, False), (1.5, True), (-2, True)],
        "presence_penalty": [(0.0, False), (0.5, True)],
        "logit_bias": [({}, False), (None, False), ({"50": -100}, True)],
        "logprobs": [(0, False), (5, False)], "max_tokens": [(1, False), (7, False), (None, False)],
        "n": [(1, False), (None, False)], "seed": [(0, False), (-5, False), (2**63 - 1, False), (-(2**63), False)],
        "stop": [(["a", "b", "c", "d"], False), ("e", False), ([], False), (None, False)],
        "suffix": [("", False), (None, False), ("end", True)], "temperature": [(0, False), (2.0, False)],
        "top_p": [(0.1, False), (1, False)], "user": [("someone", False)], "stream": [(True, False), (False, False)],
        "model": [("tiny", False)],
    },
    CHAT: {
        "audio": [({"voice": "alloy", "format": "mp3"}, True), (None, False)],
        "frequency_penalty": [(0, False), (0.1, True)], "presence_penalty": [(0, False), (-1, True)],
        "function_call": [("none", False), ({"name": "f"}, True)], "functions": [([{"name": "f"}], True), ([], False)],
        "logit_bias": [(None, False), ({"7": 1}, True)], "logprobs": [(True, False), (False, False)],
        "max_completion_tokens": [(3, False), (None, False)], "max_tokens": [(2, False)],
        "metadata": [({"a": "b"}, False)], "modalities": [(["text"], False), (["text", "audio"], True)],
        "moderation": [({"model": "m"}, True)], "n": [(2, False)], "seed": [(3, False)],
        "parallel_tool_calls": [(True, False), (False, True)],
        "prediction": [({"type": "content", "content": "x"}, False)], "prompt_cache_key": [("k", False)],
        "prompt_cache_options": [({"mode": "implicit"}, False)], "prompt_cache_retention": [("24h", False)],
        "reasoning_effort": [("low", True), (None, False)],
        "response_format": [({"type": "text"}, False), ({"type": "json_object"}, True)],
        "safety_identifier": [("s", False)], "service_tier": [("auto", False), ("flex", False)],
        "stop": [(["x"] * 4, False), (None, False)], "store": [(True, False), (False, False)],
        "stream": [(True, False)], "temperature": [(0.3, False)], "top_p": [(0.7, False)], "user": [("u", False)],
        "tool_choice": [("none", False), ("auto", False), ("required", True), (TOOL_NAMED, True)],
        "tools": [([], False), ([TOOL], True)], "verbosity": [("medium", False), ("high", True)],
        "web_search_options": [({}, True)], "model": [("tiny", False)],
    },
}  # fmt: skip


def random_body(rng, path):
    """(Request of random fields, names of the fields that must be rejected)."""
    body, rejected = {"prompt": "ab"} if path == COMPLETIONS else {"messages": MESSAGES}, set()
    values = VALUES[path]
    for name in rng.sample(sorted(values), rng.randrange(1, len(values) // 2)):
        value, is_rejected = rng.choice(values[name])
        if is_rejected and rng.random() < 0.7:
            continue
        body[name] = value
        rejected |= {name} if is_rejected else set()
    if body.get("tool_choice") == "none":
        rejected.discard("tools")  # they are left out
    if path == CHAT and body.get("logprobs") and rng.random() < 0.5:
        body["top_logprobs"] = rng.randrange(21)
    if body.get("stream"):
        body |= rng.choice(({}, {"stream_options": OBFUSCATION}, {"stream_options": {"include_usage": True}}))
        if (body.get("best_of") or 1) > (body.get("n") or 1):
            rejected.add("best_of")
    return {"max_tokens": 4, **body}, rejected


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_random_requests_of_openai_are_answered_or_rejected_by_name(http, path):
    assert type_fields(path) - set(VALUES[path]) <= {"prompt", "messages", "stream_options", "top_logprobs"}
    rng, counts = random.Random(path), {True: 0, False: 0}
    for _ in range(150):
        body, rejected = random_body(rng, path)
        answer = http.post(path, json=body)
        counts[bool(rejected)] += 1
        if not rejected:
            assert answer.status_code == 200, (body, answer.text)
            continue
        assert answer.status_code == 400, body
        error = answer.json()["error"]
        assert error["param"] in rejected and error["message"].startswith(error["param"]), (body, error)
        assert error["type"] == "invalid_request_error"
    assert min(counts.values()) > 15, counts


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_ignored_fields_change_nothing_and_used_ones_are_read(http, path):
    rules = {**request_fields.COMPLETION} if path == COMPLETIONS else {**request_fields.CHAT}
    plain = {"prompt": "ab"} if path == COMPLETIONS else {"messages": MESSAGES}
    plain |= {"max_tokens": 6, "seed": 4}
    expected = http.post(path, json=plain).json()["choices"]
    for name, rule in rules.items():
        if rule.kind == "ignored":
            for value in ("x", {"a": 1}, 3, True):
                assert http.post(path, json={**plain, name: value}).json()["choices"] == expected, name
        elif rule.kind == "used":
            assert http.post(path, json={**plain, name: {"a": [1]}}).status_code in (400, 404), name
        else:
            answer = http.post(path, json={**plain, name: {"a": [1]}})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name


@pytest.mark.parametrize(("path", "field", "value"), [
    (COMPLETIONS, "presence_penalty", False), (CHAT, "parallel_tool_calls", 1),
    (COMPLETIONS, "repetition_penalty", True), (COMPLETIONS, "skip_special_tokens", 0), (CHAT, "echo", True),
    (COMPLETIONS, "tools", []), (CHAT, "best_of", 1),
    (COMPLETIONS, "stream_options", {"include_usage": True}), (COMPLETIONS, "seed", 2**63),
])  # fmt: skip
def test_values_of_another_type_or_request_are_rejected(http, path, field, value):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    answer = http.post(path, json={**body, field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_unknown_stream_options_are_rejected(http):
    body = {"prompt": "a", "stream": True}
    for options in ({"continuous_usage_stats": True}, {"include_usage": 1}, {"include_obfuscation": "no"}):
        answer = http.post(COMPLETIONS, json={**body, "stream_options": options})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("stream_options")


@pytest.mark.parametrize(("n", "best_of", "echo"), [(1, 4, False), (2, 4, True), (3, 3, False), (2, 3, False)])
def test_best_of_returns_the_likeliest_texts_per_token(http, n, best_of, echo):
    body = {"prompt": ["def ", "the"][: 8 // best_of], "seed": 9, "max_tokens": 12, "temperature": 1.3, "stop": "e"}
    full = http.post(COMPLETIONS, json={**body, "n": best_of, "logprobs": 0, "echo": False}).json()
    expected = []
    choices = full["choices"]
    for group in (choices[first : first + best_of] for first in range(0, len(choices), best_of)):
        means = [math.fsum(x["logprobs"]["token_logprobs"]) / len(x["logprobs"]["tokens"]) for x in group]
        order = range(best_of) if n == best_of else sorted(range(best_of), key=lambda k: -means[k])[:n]
        assert all(abs(a - b) > 1e-4 for a, b in pairwise(sorted(means)))
        expected += [group[k]["text"] for k in order]
    answer = http.post(COMPLETIONS, json={**body, "n": n, "best_of": best_of, "echo": echo}).json()
    echoed = [text if echo else "" for text in body["prompt"] for _ in range(n)]
    assert [x["text"] for x in answer["choices"]] == [a + b for a, b in zip(echoed, expected)]
    assert [x["index"] for x in answer["choices"]] == list(range(n * len(body["prompt"])))
    assert answer["usage"] == full["usage"], "all texts are counted"


@pytest.mark.parametrize(("values", "param", "message"), [
    ({"n": 3, "best_of": 2}, "best_of", "best_of 2: must be at least n, which is 3"),
    ({"best_of": 0}, "best_of", "best_of 0"),
    ({"best_of": 2, "stream": True}, "best_of", "best_of 2: must not be above n, which is 1, with stream"),
    ({"best_of": 9}, "best_of", "best_of: the request has 9 texts to generate, between 1 and 8 are allowed"),
    ({"n": 9}, "n", "n: the request has 9 texts"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias: is not supported"),
    ({"prompt": "a " * 200}, "prompt", "the model takes 96"), ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": 5}, "stop", "stop: must be a string or a list of strings"), ({"stop": ["a", 5]}, "stop", "stop: must be"),
])  # fmt: skip
def test_rejected_values_have_one_message(http, values, param, message):
    answer = http.post(COMPLETIONS, json={"prompt": "a", **values})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"]
    assert error["code"] == ("context_length_exceeded" if "prompt" in values else None)


def test_a_negative_seed_repeats_its_text(http):
    texts = [http.post(COMPLETIONS, json={"prompt": "a", "seed": seed, "max_tokens": 9}).json()["choices"][0]["text"]
             for seed in (-7, -7, -8, 2**63 - 7)]  # fmt: skip
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_answers_have_the_fingerprint_of_the_server_in_every_form(http):
    results = set()
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES, "max_tokens": 3})):
        results.add(http.post(path, json=body).json()["system_fingerprint"])
        lines = http.post(path, json={**body, "stream": True}).text.split("\n\n")[:-2]
        results |= {json.loads(line.removeprefix("data: "))["system_fingerprint"] for line in lines}
    assert len(results) == 1 and results.pop().startswith("fp_")


def test_messages_of_answers_can_be_sent_again(http):
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "tiny", "temperature": 0, "max_tokens": 5}
        message = client.chat.completions.create(**options, messages=MESSAGES).choices[0].message
        repeated = [[*MESSAGES, reply, *MESSAGES] for reply in (
            message, message.model_dump(), {"role": "assistant", "content": message.content})]  # fmt: skip
        texts = [client.chat.completions.create(**options, messages=x).choices[0].message.content for x in repeated]
    assert len(set(texts)) == 1
    for key in ("audio", "function_call", "refusal"):
        answer = http.post(CHAT, json={"messages": [{**MESSAGES[0], key: {"id": "x"}}]})
        assert answer.status_code == 400 and f"messages.{key}" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("template", "role"), [("{{ messages[0].role }}", "system"), ("{# developer #}", "developer")])
def test_developer_messages_are_system_messages_for_templates_without_them(tmp_path, template, role):
    from megatron.core.inference.server.fields import Fields
    from megatron.core.inference.server.protocol import Model, read_chat
    from megatron.core.tokenizers.huggingface import build_huggingface
    from tests.test_utils.scripted_model import byte_tokenizer

    byte_tokenizer(tmp_path, template + "{{ messages[0].role + reasoning_effort|default('') }}")
    service = Model("m", build_huggingface(str(tmp_path)), 99, 4)
    body = {"messages": [{"role": "developer", "content": "Be brief."}], "reasoning_effort": "low"}
    assert read_chat(Fields(json.dumps(body).encode()), service).texts[0].endswith(f"{role}low")
