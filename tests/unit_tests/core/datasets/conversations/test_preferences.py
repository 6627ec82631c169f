"""Preference pairs: prompts, masks and bad lines."""

import json

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.conversations.preferences import PREFERENCES
from megatron.core.datasets.conversations.prepare import prepared
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.chats import TEMPLATES, THINKING, assistant, tokenizer_folder, user, write_lines

PROMPT = [user("Which color?"), assistant("Of what?"), user("The sky.")]
CHAT = {"prompt": PROMPT, "chosen": [assistant("It is blue.")], "rejected": [assistant("It is green!")]}
IMPLICIT = {name: [*PROMPT, *CHAT[name]] for name in ("chosen", "rejected")}
TEXTS = {"prompt": "The sky is", "chosen": " blue.", "rejected": " black, usually."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_huggingface(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


def pairs(path, tokenizer):
    """Return (ids, ids in the loss) of each sequence, and the report."""
    arrays, report, _ = prepared(path, tokenizer, None, PREFERENCES)
    parts = np.split(arrays["tokens"].astype(int), np.cumsum(arrays["lengths"])[:-1]) if len(arrays["lengths"]) else []
    return [(np.where(part < 0, -1 - part, part).tolist(), part[part >= 0].tolist()) for part in parts], report


@pytest.mark.parametrize("line", [CHAT, IMPLICIT], ids=["prompt", "implicit prompt"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_the_template(tmp_path, name, line):
    """The ids are ``apply_chat_template``'s; the loss covers the last answer of its mask."""
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path / "tokenizer", TEMPLATES[name])
    reference = AutoTokenizer.from_pretrained(folder)
    sequences, report = pairs(write_lines(tmp_path / "pairs.jsonl", [line]), build_huggingface(folder))
    assert len(sequences) == 2 and report.conversations == 1
    for key, (ids, trained) in zip(("chosen", "rejected"), sequences):
        expected = reference.apply_chat_template(
            IMPLICIT[key], return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        all_ids, mask = expected["input_ids"], np.array(expected["assistant_masks"])
        first = np.flatnonzero(np.diff(mask, prepend=0) == 1)[-1]
        assert ids[: len(all_ids)] == all_ids[: len(ids)]
        assert trained == [index for index, retained in zip(all_ids[first:], mask[first:]) if retained]


def test_texts_have_their_completion_and_end_token_in_the_loss(tmp_path, tokenizer):
    implicit = {key: TEXTS["prompt"] + TEXTS[key] for key in ("chosen", "rejected")}
    (explicit, _), (common, _) = (
        pairs(write_lines(tmp_path / f"{number}.jsonl", [line]), tokenizer)
        for number, line in enumerate((TEXTS, implicit))
    )
    assert explicit == common  # the common letters "bl" belong to the completions
    for key, (ids, trained) in zip(("chosen", "rejected"), explicit):
        assert tokenizer.detokenize(trained) == TEXTS[key] + "</s>"
        assert ids[-len(trained) :] == trained


def test_prefix_of_the_other_text_keeps_a_completion(tmp_path, tokenizer):
    line = {"chosen": "Yes, it is", "rejected": "Yes, it is so"}
    sequences, _ = pairs(write_lines(tmp_path / "pairs.jsonl", [line]), tokenizer)
    assert [tokenizer.detokenize(trained) for _, trained in sequences] == [" is</s>", " is so</s>"]


BAD = {
    "conversations": ({"messages": PROMPT}, "has no chosen and no rejected .it has messages.; a preference pair has"),
    "one completion": ({"prompt": "a", "chosen": "b"}, "has no rejected "),
    "text prompt": ({**IMPLICIT, "prompt": "a"}, "all lists of messages; if chosen and rejected contain the prompt"),
    "text and messages": ({**IMPLICIT, "chosen": "a"}, "must all be texts, or all lists of messages$"),
    "a number": ({"prompt": "a", "chosen": 1, "rejected": "c"}, "must all be texts"),
    "a role": ({**CHAT, "chosen": [{"role": "bot", "content": "a"}]}, "prompt and chosen.3.: role is 'bot'"),
    "no answer": ({**CHAT, "rejected": []}, "rejected: has nothing after the prompt; both completions must begin"),
    "other users": ({**IMPLICIT, "chosen": [user("a"), assistant("b")]}, "chosen: has user after the prompt"),
    "answer twice": ({**CHAT, "prompt": IMPLICIT["chosen"]}, "roles out of order: assistant follows assistant"),
    "no object": ("[1]\n", "is no JSON object but a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_line_is_named(tmp_path, tokenizer, name):
    line, message = BAD[name]
    text = line if isinstance(line, str) else json.dumps(line) + "\n"
    path = write_lines(tmp_path / "pairs.jsonl", [CHAT, "\n", text])
    with pytest.raises(UserError, match=f"^{path}, line 3: .*{message}"):
        prepared(path, tokenizer, None, PREFERENCES)


def test_template_that_changes_earlier_answers_is_named(tmp_path):
    tokenizer = build_huggingface(tokenizer_folder(tmp_path / "tokenizer", THINKING))
    line = {**CHAT, "chosen": [*CHAT["chosen"], user("Why?"), assistant("Because.")]}
    with pytest.raises(UserError, match="line 1: chosen: the chat template renders its earlier answers in another way"):
        prepared(write_lines(tmp_path / "pairs.jsonl", [line]), tokenizer, None, PREFERENCES)


def test_pairs_left_out_are_counted(tmp_path, tokenizer):
    same = {**CHAT, "rejected": CHAT["chosen"]}
    unweighted = {**CHAT, "rejected": [assistant("c", weight=0)]}
    lines = [same, {**TEXTS, "rejected": " "}, {**CHAT, "score": 1}, unweighted]
    sequences, report = pairs(write_lines(tmp_path / "pairs.jsonl", lines), tokenizer)
    assert len(sequences) == 2
    assert report.counts == {"equal": 1, "blank": 1, "unpaired": 2, "key score": 1, "without_answer": 1}
    assert report.first == {"equal": 1, "blank": 2, "unpaired": 2, "key score": 3, "without_answer": 4}
    assert "2 preference pairs of which a completion has no token with a loss, left out (first: line 2)" in "\n".join(
        report.text()
    )


def test_stored_pairs_are_not_taken_for_conversations(tmp_path, tokenizer):
    path = write_lines(tmp_path / "pairs.jsonl", [CHAT])
    key = prepared(path, tokenizer, None, PREFERENCES)[2]
    assert prepared(path, tokenizer, None, PREFERENCES)[2] == key
    with pytest.raises(UserError, match="is a preference pair"):
        prepared(path, tokenizer, None)
