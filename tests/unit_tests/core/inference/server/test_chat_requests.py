"""Chat requests become the prompt of transformers: tools, tool calls, parts, variables of the template."""

import json
import random

import pytest

from megatron.core.inference.server.fields import Fields, RequestError
from megatron.core.inference.server.protocol import Model, read_chat
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.chat_templates import TEMPLATES, TOOL
from tests.test_utils.scripted_model import byte_tokenizer
from tests.unit_tests.core.tokenizers.test_chat import random_messages, random_options


def read(tokenizer, **body):
    (ids,) = read_chat(Fields(json.dumps(body).encode()), Model("m", tokenizer, 4096, 4)).prompts
    return ids


def with_text_arguments(message):
    """The message as OpenAI's client sends it: arguments of tool calls are JSON in a string."""
    calls = [
        {**call, "id": "1", "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_of_random_requests_equal_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    byte_tokenizer(tmp_path, TEMPLATES[name], "<s> $A </s>", pad_token="<p>", image_token="<|image|>")
    local, foreign = build_huggingface(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    rng, compared = random.Random(name), 0
    for _ in range(120):
        messages, options = random_messages(rng, name), random_options(rng)
        if "tools" not in TEMPLATES[name]:
            options.pop("tools", None)
        body = dict(options)
        variables = {"enable_thinking": body.pop("enable_thinking")} if "enable_thinking" in body else {}
        body["messages"] = list(map(with_text_arguments, messages))
        try:
            expected = foreign.apply_chat_template(messages, return_dict=False, **options)
        except Exception:  # the template or transformers rejects them
            continue
        assert read(local, **body, chat_template_kwargs=variables) == expected
        compared += 1
    assert compared > 30


def test_tools_are_left_out_when_the_model_must_not_call_them(tmp_path):
    byte_tokenizer(tmp_path, TEMPLATES["tools_and_thinking"])
    tokenizer, messages = build_huggingface(str(tmp_path)), [{"role": "user", "content": "a"}]
    plain = read(tokenizer, messages=messages)
    assert read(tokenizer, messages=messages, tools=[], tool_choice="auto") == plain
    assert read(tokenizer, messages=messages, tools=[TOOL], tool_choice="none") == plain
    assert read(tokenizer, messages=messages, tools=[TOOL], tool_choice="auto") != plain


@pytest.mark.parametrize(("body", "message"), [
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice: must be none or auto"),
    ({"tools": [TOOL]}, "tools: this model's chat template does not take tools; remove them"),
    ({"tools": ["x"]}, "tools: must be"), ({"documents": [1]}, "documents: must be"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs: must be"),
    ({"chat_template_kwargs": {"messages": []}}, "must not be a variable"),
    ({"continue_final_message": True}, "must not be combined with add_generation_prompt"),
    ({"messages": [{"role": "user"}]}, "messages.content: must be"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls.function: must be"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, "function.name: must"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]}, "function.name: must be"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text"),
])  # fmt: skip
def test_wrong_requests_are_named(tmp_path, body, message):
    byte_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(Exception, match=message) as caught:
        read(build_huggingface(str(tmp_path)), **{"messages": [{"role": "user", "content": "a"}], **body})
    assert isinstance(caught.value, RequestError) or "variable" in message or "combined" in message
