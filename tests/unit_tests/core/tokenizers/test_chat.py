"""Chat templates: text and ids of transformers, one message for errors, no way out of the sandbox."""

import json
import random

import pytest

from megatron.core.config.errors import UserError
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.chat import ChatTemplates
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.chat_templates import TEMPLATES, TOOL
from tests.test_utils.scripted_model import byte_tokenizer
from tests.test_utils.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe, flags

MESSAGES = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hello"}]
POSTS = (None, "<s> $A", "$A </s>", "<s> $A </s>")
WORDS = [
    "hello", " there", "\n", "<|im_end|>", "<s>", "</s>", "é", "😀", "中文", "'\"", "  ", "{{x}}", "</think>", "<&>",
]  # fmt: skip


@pytest.fixture(scope="module")
def auto():
    transformers = pytest.importorskip("transformers", reason="pip install transformers: it is what is compared with")
    return lambda folder: transformers.AutoTokenizer.from_pretrained(str(folder))


def random_text(rng):
    return "".join(rng.choices(WORDS, k=rng.randrange(5)))


def random_messages(rng, name):
    """A conversation of the roles and fields that the template ``name`` reads."""
    messages = [{"role": "system", "content": random_text(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": random_text(rng)})
        if rng.random() < 0.3 and name == "parts":
            texts = [random_text(rng) for _ in range(rng.randrange(1, 3))]
            messages[-1]["content"] = [{"type": "text", "text": text} for text in texts]
        answer = {"role": "assistant", "content": random_text(rng)}
        answer |= (
            {rng.choice(("reasoning_content", "thinking", "reasoning")): random_text(rng)} if rng.random() < 0.4 else {}
        )
        calls = rng.choice(
            (None, [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}])
        )
        if calls and name in ("tools_and_thinking", "dates_and_headers"):
            answer |= {"tool_calls": calls, "content": rng.choice((None, "", "text"))}
            reply = {"role": "tool", "name": "weather", "tool_call_id": "1", "content": random_text(rng)}
            messages += [answer, reply]
            continue
        messages.append(answer)
    if name == "generation_and_loops":
        messages.insert(rng.randrange(len(messages)), {"role": rng.choice(("stop", "skip", "x")), "content": "!"})
    return messages[: rng.randrange(1, len(messages) + 1)]


def random_options(rng):
    options = {"add_generation_prompt": rng.random() < 0.5}
    if not options["add_generation_prompt"] and rng.random() < 0.5:
        options["continue_final_message"] = True
    options |= {"tools": [TOOL]} if rng.random() < 0.4 else {}
    options |= {"documents": [{"title": "é", "text": "b"}]} if rng.random() < 0.3 else {}
    return options | ({"enable_thinking": rng.random() < 0.5} if rng.random() < 0.5 else {})


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_texts_of_random_conversations_equal_transformers(auto, tmp_path, name):
    rng, compared = random.Random(name), 0
    for post in POSTS:
        folder = tmp_path / f"{POSTS.index(post)}"
        byte_tokenizer(folder, TEMPLATES[name], post, pad_token="<p>", image_token="<|image|>")
        local, foreign = build_huggingface(str(folder)), auto(folder)
        for _ in range(40):
            messages, options = random_messages(rng, name), random_options(rng)
            try:
                ids = foreign.apply_chat_template(messages, return_dict=False, **options)
            except Exception:  # the template or transformers rejects them
                with pytest.raises(UserError):
                    local.render_chat(messages, **options)
                continue
            text = local.render_chat(messages, **options)
            assert text == foreign.apply_chat_template(messages, tokenize=False, **options)
            assert local.tokenize_chat(text) == ids, (post, messages, options)
            compared += 1
    assert compared > 60


def test_a_tokenizer_of_llamas_kind_adds_no_second_beginning(auto, tmp_path):
    template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    folder = byte_fallback_bpe(tmp_path, chat_template=template)
    local, messages = build_huggingface(folder), [{"role": "user", "content": "the cat 😀"}]
    ids = local.tokenize_chat(local.render_chat(messages))
    assert ids == auto(folder).apply_chat_template(messages, return_dict=False, add_generation_prompt=True)
    assert ids.count(local.bos) == 1 and local.tokenize("the cat")[0] == local.bos


NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "audio_token", "boi", "foo_token")
VARIABLES = "".join(f"[{{{{ {name} if {name} is defined else 'none' }}}}]" for name in NAMES)
TOKENS = ("<s>", "</s>", "<|im_end|>", "<n1>", "<n2>", "<n3>", "<n4>")


def random_token(rng, marker):
    """A text, or its fields with ``marker``."""
    fields = {"lstrip": rng.random() < 0.3, "rstrip": False, "normalized": False, "single_word": False, **marker}
    return rng.choice((text := rng.choice(TOKENS), {"content": text, **fields}))


def random_specials(rng):
    """Keys of tokenizer_config.json that name special tokens, and special_tokens_map.json or None."""
    marker = {"__type": "AddedToken"}
    config = {name: random_token(rng, marker) for name in NAMES[:6] if rng.random() < 0.7}
    if rng.random() < 0.4:
        config["additional_special_tokens"] = [random_token(rng, marker)]
    if rng.random() < 0.4:
        config["extra_special_tokens"] = rng.choice(({"boi": "<n1>", "foo_token": "<n2>"}, {}, ["<n2>", "<n3>"]))
    if rng.random() < 0.5:
        config["model_specific_special_tokens"] = {"boi": "<n2>", "foo_token": "<n3>"}
    if rng.random() < 0.3:
        fields = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
        config["added_tokens_decoder"] = {"260": {"content": "<n1>", **fields}}
    roles = {name: random_token(rng, {}) for name in NAMES[:4] if rng.random() < 0.4}
    roles |= {"additional_special_tokens": ["<n3>"]} if rng.random() < 0.5 else {}
    return config, roles if rng.random() < 0.4 else None


def test_special_tokens_are_the_variables_that_transformers_gives(auto, tmp_path):
    """Under any name, from each of the keys and files that may name them."""
    rng, token = random.Random(2), {"__type": "AddedToken", "content": "<n3>", "lstrip": False}
    cases = [
        ({"image_token": "<n4>", "audio_token": token}, None),
        ({"additional_special_tokens": []}, {"additional_special_tokens": ["<n4>"]}),
        *(random_specials(rng) for _ in range(50)),
    ]
    for number, (config, roles) in enumerate(cases):
        folder = tmp_path / str(number)
        byte_tokenizer(folder, VARIABLES + "{% for m in messages %}{{ m.content }}{% endfor %}", **config)
        if roles is not None:
            (folder / "special_tokens_map.json").write_text(json.dumps(roles))
        local, foreign = build_huggingface(str(folder)), auto(folder)
        messages = [{"role": "user", "content": " ".join(TOKENS)}]
        text = local.render_chat(messages)
        assert text == foreign.apply_chat_template(messages, tokenize=False), (config, roles)
        assert local.tokenize_chat(text) == foreign.apply_chat_template(messages, return_dict=False), (config, roles)


def test_parts_are_joined_for_templates_that_expect_texts(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages, joined = [{"role": "user", "content": parts}], [{"role": "user", "content": "ab"}]
    for name, source in TEMPLATES.items():
        chat = ChatTemplates({"default": source}, {"bos_token": "<s>"})
        assert chat.takes_parts(source) == (name == "parts")
        assert chat.render(messages) == chat.render(joined)
    with pytest.raises(UserError, match="takes only parts of type text"):
        ChatTemplates({"default": TEMPLATES["alternating"]}).render([{"role": "user", "content": [{"type": "image"}]}])


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
EXTRA = "additional_chat_templates"


@pytest.mark.parametrize("files, config", [
    ({}, NAMED), ({}, NAMED[:1]), ({}, NAMED[1:]), ({"chat_template.jinja": "F"}, NAMED), ({}, "C"),
    ({"chat_template.jinja": "F", f"{EXTRA}/tool_use.jinja": "E"}, "C"), ({f"{EXTRA}/tool_use.jinja": "E"}, "C"),
    ({"chat_template.jinja": "F", f"{EXTRA}/rag.jinja": "E"}, None),
])  # fmt: skip
def test_the_template_is_the_one_that_transformers_takes(auto, tmp_path, files, config):
    byte_tokenizer(tmp_path, config)
    (tmp_path / EXTRA).mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    local, foreign = build_huggingface(str(tmp_path)), auto(tmp_path)
    for tools in (None, [], [TOOL]):
        try:
            expected = foreign.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(UserError, match="no default chat template; it has tool_use"):
                local.render_chat(MESSAGES, tools=tools)
            continue
        assert local.render_chat(MESSAGES, tools=tools) == expected


def test_a_tokenizer_without_a_template_says_so(tmp_path):
    byte_level_bpe(tmp_path / "tokenizer.json")
    tokenizer = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    with pytest.raises(UserError, match="--chat: the HuggingFaceTokenizer has no chat template; remove it"):
        tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('only users') }}", "rejects the messages: only users"), ("{% if %}", "TemplateSyntaxError"),
    ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"), ("{{ messages[0].update(a=1) }}", "SecurityError"),
    ("{{ strftime_now.__globals__.x }}", "failed"),
    ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "SecurityError"),
    ("{{ namespace(__init__=1).x }}", "SecurityError"),
])  # fmt: skip
def test_a_template_that_fails_is_one_message(template, message):
    with pytest.raises(UserError, match=message):
        ChatTemplates({"default": template}).render(MESSAGES)


@pytest.mark.parametrize(("messages", "options", "message"), [
    ([], {}, "messages: must have at least one message"),
    (MESSAGES, {"messages": 1}, "messages: must not be a variable"),
    (MESSAGES, {"continue_final_message": True}, "must not be combined with add_generation_prompt"),
    ([{"role": "user"}], {"continue_final_message": True, "add_generation_prompt": False}, "no text to continue"),
    (MESSAGES[:1], {"continue_final_message": True, "add_generation_prompt": False}, "changes or leaves out"),
])  # fmt: skip
def test_wrong_options_are_named(messages, options, message):
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=message):
        ChatTemplates({"default": template}).render(messages, **options)


def test_the_generate_tool_sends_the_ids_of_transformers(tmp_path, capsys):
    from megatron.console import run_tool
    from tests.test_utils.scripted_model import scripted_folder

    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if think %}<|im_end|>{% endif %}"
    folder = scripted_folder(tmp_path / "f", "<|im_end|>Abc</s>q", template=template, post="$A </s>")
    common = ["generate", ["--load", folder, "--prompt", "x", "--temperature", "0", "--max-new-tokens", "9"]]
    variables = ["--chat", "--chat-template-kwargs", json.dumps({"think": True})]
    assert run_tool(common[0], [*common[1], *variables]) == 0
    assert capsys.readouterr().out == "<|im_start|>x<|im_end|>Abc\n"
    assert run_tool(common[0], [*common[1], *variables[1:]]) == 2
    assert "--chat-template-kwargs: requires --chat; add it" in capsys.readouterr().err
