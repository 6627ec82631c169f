"""Chat templates: the text of transformers, one message for errors, no way out of the sandbox."""

import json

import pytest

from megatron.core.config.errors import UserError
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.chat import render_chat
from tests.test_utils.tiny_tokenizers import byte_level_bpe, flags

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n<|{{ message['role'] }}|>{{ message['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}\n<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hello"}]


def build_with_config(folder, **config):
    byte_level_bpe(folder / "tokenizer.json", special=("<|endoftext|>", "<s>"))
    config = {"eos_token": "<|endoftext|>", "bos_token": "<s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(folder)))


NAMED = [{"name": "tool", "template": ""}, {"name": "default", "template": TEMPLATE}]


@pytest.mark.parametrize("template", [TEMPLATE, NAMED])
def test_a_conversation_is_the_text_of_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers", reason="pip install transformers: it is what is compared with")
    local = build_with_config(tmp_path, chat_template=template, tokenizer_class="PreTrainedTokenizerFast")
    foreign = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = foreign.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert local.chat_prompt(MESSAGES) == expected
    assert local.tokenize(expected)[0] == local.special_ids["bos"]


def test_a_template_file_comes_before_the_configuration(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0]['content'] }}")
    assert build_with_config(tmp_path, chat_template=TEMPLATE).chat_prompt(MESSAGES) == "file: Be brief. "


def test_a_tokenizer_without_a_template_says_so(tmp_path):
    with pytest.raises(UserError, match="--chat: the HuggingFaceTokenizer has no chat template; remove it"):
        build_with_config(tmp_path).chat_prompt(MESSAGES)


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('only users') }}", "rejects the messages: only users"), ("{% if %}", "TemplateSyntaxError"),
    ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
])  # fmt: skip
def test_a_template_that_fails_is_one_message(template, message):
    with pytest.raises(UserError, match=message):
        render_chat(template, MESSAGES, {})
