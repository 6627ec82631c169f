"""Ids and loss masks of conversations: equal to ``transformers`` token by token, and to planted answers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.conversations.formats import Conversation, Text
from megatron.core.datasets.conversations.masks import answer_spans, tokenize_answers, tokenize_text
from megatron.core.tokenizers.chat import ChatTemplates
from megatron.core.tokenizers.huggingface import build_huggingface
from megatron.core.tokenizers.sft import PROMPT_FORMATS, use_template
from tests.test_utils.chats import MISTRAL, SPECIAL, TEMPLATES, THINKING, assistant, tokenizer_folder, user

CHATS = {
    "two turns": [user("Hi there"), assistant("Hello!"), user("2+2?"), assistant("It is 4.\nYes.")],
    "system": [{"role": "system", "content": "Be brief."}, user("naïve 中文?"), assistant("👩‍👩‍👧 ok ")],
    "edges": [user("  spaces  "), assistant("\n\nlines\n"), user("x"), assistant("<b>1</b>")],
}


def tokenizer_with(folder, template):
    """A tokenizer with the special tokens that ``template`` writes."""
    special = dict.fromkeys([*SPECIAL, *re.findall(r"<\|[^<>| ]{1,40}\|>", template)])
    tokenizer = build_huggingface(tokenizer_folder(folder, special=special))
    tokenizer.chat = ChatTemplates({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


def sequences(tokenizer, messages, **keys):
    return [
        tokenize_answers(tokenizer, text, spans)
        for text, spans in answer_spans(tokenizer, Conversation(messages, **keys))
    ]


def answers(tokenizer, tokens):
    """Texts in the loss, one per answer."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], tokens.trained, [False]])))
    return [tokenizer.detokenize(tokens.ids[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2])]


def oracle(folder, template, messages):
    """Ids and mask of ``transformers``."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], encoded["assistant_masks"]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_equal_transformers(tmp_path, name, chat):
    messages = CHATS[chat]
    (tokens,) = sequences(tokenizer_with(tmp_path, TEMPLATES[name]), messages)
    ids, mask = oracle(tmp_path, TEMPLATES[name], messages)
    assert tokens.ids.tolist() == ids
    assert tokens.trained.astype(int).tolist() == mask and sum(mask) > 2


TRL_NAMES = ("cohere", "gemma", "gemma3", "lfm2_v2", "llama3", "nemotron_3_nano", "qwen2_5",
             "qwen3_instruct_2507", "qwen3_vl")  # fmt: skip
PROMPTED = ("\n", "<think></think>")
"""Text that these templates prompt with, but TRL's training templates count as the answer."""


@pytest.mark.parametrize("name", TRL_NAMES)
def test_masks_of_published_templates_equal_trl(tmp_path, name):
    trl = pytest.importorskip("trl")
    folder, messages = Path(trl.__file__).parent / "chat_templates", CHATS["two turns"]
    published, training = ((folder / f"{name}{kind}.jinja").read_text() for kind in ("", "_training"))
    tokenizer = tokenizer_with(tmp_path, published)
    (tokens,) = sequences(tokenizer, messages)
    ids, mask = oracle(tmp_path, training, messages)
    assert tokens.ids.tolist() == ids
    expected_answers = answers(tokenizer, type(tokens)(np.array(ids), np.array(mask, dtype=bool)))
    for prompted in PROMPTED:  # and the line end after the end of a turn
        expected_answers = [text.removeprefix(prompted) for text in expected_answers]
    assert answers(tokenizer, tokens) == [text.rstrip("\n") for text in expected_answers]


def test_loss_covers_the_answer_and_its_end_token_only(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES["chatml"])
    (tokens,) = sequences(tokenizer, CHATS["two turns"])
    assert answers(tokenizer, tokens) == ["Hello!<|im_end|>", "It is 4.\nYes.<|im_end|>"]


def test_weight_0_takes_an_answer_out_of_the_loss(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES["chatml"])
    messages = [user("a"), assistant("one", weight=0), user("b"), assistant("two")]
    (tokens,) = sequences(tokenizer, messages)
    assert answers(tokenizer, tokens) == ["two<|im_end|>"]
    assert "one<|im_end|>" in tokenizer.detokenize(tokens.ids.tolist())


def test_thinking_that_a_template_removes_is_trained_in_a_separate_sequence(tmp_path):
    """Each sequence is what the model reads and writes at inference."""
    tokenizer = tokenizer_with(tmp_path, THINKING)
    messages = [
        user("a"),
        assistant("one", reasoning_content="r1"),
        user("b"),
        assistant("two", reasoning_content="r2"),
    ]
    first, second = sequences(tokenizer, messages)
    assert answers(tokenizer, first) == ["<think>\nr1\n</think>\n\none<|im_end|>"]
    assert answers(tokenizer, second) == ["<think>\nr2\n</think>\n\ntwo<|im_end|>"]
    text = tokenizer.detokenize(second.ids.tolist())
    assert "r1" not in text and text.startswith(tokenizer.render_chat(messages[:3]))


def test_empty_thinking_block_is_part_of_the_prompt(tmp_path):
    tokenizer = tokenizer_with(tmp_path, THINKING)
    (tokens,) = sequences(tokenizer, [user("a"), assistant("one")])
    assert answers(tokenizer, tokens) == ["one<|im_end|>"]
    assert tokenizer.detokenize(tokens.ids.tolist()).endswith("<think>\n\n</think>\n\none<|im_end|>\n")


def test_turns_between_tools_share_one_sequence(tmp_path):
    tokenizer = tokenizer_with(tmp_path, THINKING)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [user("1?"), assistant("", reasoning_content="call", tool_calls=[call]),
                {"role": "tool", "content": "2"}, assistant("two", reasoning_content="read")]  # fmt: skip
    (tokens,) = sequences(tokenizer, messages, tools=[{"name": "add"}])
    one, two = answers(tokenizer, tokens)
    assert one.startswith("<think>\ncall\n</think>\n\n<tool_call>{") and one.endswith("</tool_call><|im_end|>")
    assert two == "<think>\nread\n</think>\n\ntwo<|im_end|>"


def test_prompt_that_the_answer_does_not_continue_is_an_error(tmp_path):
    template = TEMPLATES["chatml"].replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
    with pytest.raises(UserError, match=r"messages\[1\]: the chat template opens this answer with .*--chat-template"):
        sequences(tokenizer_with(tmp_path, template), [user("a"), assistant("one")])


def test_only_tokens_that_end_generation_end_an_answer_without_an_end_token(tmp_path):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = tokenizer_with(tmp_path, template + "{# <|user|> #}")
    (tokens,) = sequences(tokenizer, [user("a"), assistant("one"), user("b"), assistant("two")])
    assert answers(tokenizer, tokens) == ["one", f"two{tokenizer.detokenize([tokenizer.eod])}"]


def test_first_answer_excludes_answers_of_the_prompt(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES["chatml"])
    (tokens,) = sequences(tokenizer, CHATS["two turns"], first_answer=3)
    assert answers(tokenizer, tokens) == ["It is 4.\nYes.<|im_end|>"]


def test_bos_occurs_once(tmp_path):
    """Templates write it, and so does this tokenizer around a text."""

    def begin_with_bos(definition):
        piece = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        ids = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
        definition["post_processor"] = {
            "type": "TemplateProcessing", "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": ids,
        }  # fmt: skip

    from tests.test_utils.tiny_tokenizers import byte_level_bpe

    tokenizer_folder(tmp_path, TEMPLATES["llama3"])
    byte_level_bpe(tmp_path / "tokenizer.json", special=SPECIAL, edit=begin_with_bos)
    tokenizer = build_huggingface(str(tmp_path))
    assert tokenizer.tokenize("a")[0] == tokenizer.bos
    (tokens,) = sequences(tokenizer, CHATS["two turns"])
    texts = [tokens, tokenize_text(tokenizer, Text("b", "a")), tokenize_text(tokenizer, Text("b", "<s>a"))]
    for tokens in texts:
        assert tokens.ids[0] == tokenizer.bos and (tokens.ids == tokenizer.bos).sum() == 1
        assert not tokens.trained[0]


def test_text_has_its_end_token_once(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES["chatml"])
    for text in (Text(" world", "Hello"), Text(" world</s>", "Hello")):
        tokens = tokenize_text(tokenizer, text)
        assert answers(tokenizer, tokens) == [" world</s>"]
    assert answers(tokenizer, tokenize_text(tokenizer, Text("Hello world"))) == ["Hello world</s>"]


def test_answer_without_an_end_token_gets_one(tmp_path):
    tokenizer = tokenizer_with(tmp_path, MISTRAL.replace(" + eos_token", ""))
    (tokens,) = sequences(tokenizer, [user("a"), assistant("one")])
    assert answers(tokenizer, tokens) == [" one</s>"]


def test_token_across_the_border_of_an_answer_is_in_the_loss(tmp_path):
    """``Bot: hi`` is tokenized as one text: `` hi`` is one token, whose blank belongs to the prompt."""
    template = (
        "{%- for m in messages %}{{- ('You: ' if m.role == 'user' else 'Bot: ') + m.content + '\\n' }}{%- endfor %}"
    )
    template += "{%- if add_generation_prompt %}{{- 'Bot: ' }}{%- endif %}"
    tokenizer = tokenizer_with(tmp_path, template)
    (tokens,) = sequences(tokenizer, [user("a"), assistant("brown fox")])
    assert tokens.ids.tolist()[:-1] == tokenizer.tokenize_chat("You: a\nBot: brown fox\n")
    assert answers(tokenizer, tokens) == [" brown fox\n</s>"]


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("identity", "Be brief.Hihello", ["hello</s>"]),
        (
            "nemotron-h-aligned",
            "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\nhello\n",
            ["hello\n</s>"],
        ),
        (
            "nemotron-nano-v2",
            "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\nhello\n<SPECIAL_12>\n",
            ["hello\n<SPECIAL_12>"],
        ),
    ],
)
def test_prompt_formats_of_megatron_lm(tmp_path, name, text, expected):
    tokenizer = tokenizer_with(tmp_path, "")
    use_template(tokenizer, PROMPT_FORMATS[name])
    messages = [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("hello")]
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == text
    (tokens,) = sequences(tokenizer, messages)
    assert answers(tokenizer, tokens) == expected


def test_reasoning_has_several_names(tmp_path):
    tokenizer = tokenizer_with(tmp_path, THINKING)
    texts = {
        json.dumps(answers(tokenizer, sequences(tokenizer, [user("a"), assistant("x", **{name: "why"})])[0]))
        for name in ("reasoning_content", "reasoning", "thinking")
    }
    assert len(texts) == 1 and "why" in texts.pop()
