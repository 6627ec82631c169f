"""Token ids and loss masks of conversations.

The answer with index i is what ``render(messages[:i + 1])`` adds to ``render(messages[:i], generation prompt)``: the
tokens that the model writes at inference, up to the end of its turn. A template may render an answer differently once
further messages follow (Qwen3 removes the thinking of earlier turns). Each such answer becomes a separate sequence, in
the text that the model sees at inference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.datasets.conversations.formats import Conversation, Text
from megatron.core.tokenizers.base import Tokenizer

Span = tuple[int, int]
REASONING = ("reasoning_content", "thinking", "reasoning")


class Tokens(NamedTuple):
    """One sequence: ids int64 [n], and whether each is in the loss, bool [n]."""

    ids: np.ndarray
    trained: np.ndarray


def tokenize_text(tokenizer: Tokenizer, text: Text) -> Tokens:
    """Return the tokens of a prompt and its completion, with the tokens that the tokenizer puts before a text, and the
    end-of-document token. The loss excludes the prompt."""
    full = text.prompt + text.completion
    ids, trained = _tokens_of_spans(tokenizer, full, [(len(text.prompt), len(full))])
    before = np.array([index for index in tokenizer.tokenize("") if index != tokenizer.eod], dtype=np.int64)
    if len(ids) and len(before) and ids[0] == before[-1]:
        before = before[:-1]  # the text writes the token itself
    ends = np.array([tokenizer.eod], dtype=np.int64) if not len(ids) or ids[-1] != tokenizer.eod else before[:0]
    around = [np.zeros(len(before), dtype=bool), trained, np.ones(len(ends), dtype=bool)]
    return Tokens(np.concatenate([before, ids, ends]), np.concatenate(around))


def tokenize_answers(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Tokens:
    """Return the tokens of a rendered ``text`` with answers in ``spans``. The loss of an answer ends with its
    end-of-turn token: the text after it is out. Of an answer without one, a following token that ends generation counts
    (GLM's next role); after the last one the end-of-document token is added."""
    ids, trained = _tokens_of_spans(tokenizer, text, spans)
    special = tokenizer.all_special_ids
    for start, stop in _runs(trained):
        last = stop - 1
        while last > start and ids[last] not in special and tokenizer.detokenize([int(ids[last])]).isspace():
            last -= 1
        if ids[last] in special:
            trained[last + 1 : stop] = False
        elif stop == len(ids):
            ids, trained = np.append(ids, tokenizer.eod), np.append(trained, True)
        elif ids[stop] in tokenizer.end_ids:
            trained[stop] = True
    return Tokens(ids, trained)


def answer_spans(tokenizer: Tokenizer, chat: Conversation) -> Iterator[tuple[str, list[Span]]]:
    """Yield (rendered text, character ranges of its answers) for each sequence of a conversation: usually one, up to
    the end of its last answer; none without an answer. Raises UserError if the template rejects the messages, or opens
    an answer in another way than it prompts for it."""
    messages, answers = chat.messages, _answers(chat)
    ends = {
        index: tokenizer.render_chat(messages[: index + 1], tools=chat.tools, add_generation_prompt=False)
        for index in answers
    }
    starts = {index: len(_prompt(tokenizer, chat, index, ends[index])) for index in answers}
    sequences = []
    while answers:
        text = ends[answers[-1]]
        inside = [index for index in answers if text.startswith(ends[index])]
        sequences.append((text, [(starts[index], len(ends[index])) for index in inside]))
        answers = [index for index in answers if index not in inside]
    yield from reversed(sequences)


def _answers(chat: Conversation) -> list[int]:
    messages = enumerate(chat.messages[chat.first_answer :], chat.first_answer)
    return [index for index, message in messages if message["role"] == "assistant" and message.get("weight", 1)]


def _prompt(tokenizer: Tokenizer, chat: Conversation, index: int, end: str) -> str:
    """Return the text before the answer ``index``, with which the text ``end`` begins. An answer without reasoning
    follows the empty thinking block that ``enable_thinking=False`` prompts with, if the template has one."""
    message = chat.messages[index]
    options: list[dict[str, object]] = [{}]
    if not read_reasoning(message) and "<think>" not in str(message.get("content")):
        options.append({"enable_thinking": False})
    prompts = [
        tokenizer.render_chat(chat.messages[:index], tools=chat.tools, add_generation_prompt=True, **option)
        for option in options
    ]
    matches = [prompt for prompt in prompts if end.startswith(prompt)]
    if not matches:
        raise UserError(
            f"messages[{index}]: the chat template opens this answer with {_differing(end, prompts[0])!r}, but prompts "
            f"the model with {_differing(prompts[0], end)!r}; give a template for training by --chat-template"
        )
    return max(matches, key=len)


def _differing(text: str, other: str) -> str:
    common = next((place for place, (x, y) in enumerate(zip(text, other)) if x != y), min(len(text), len(other)))
    return text[max(0, common - 8) : common + 24]


def read_reasoning(message: dict[str, object]) -> str:
    """Return the reasoning text of a message, empty without one."""
    return next((str(message[name]) for name in REASONING if message.get(name)), "")


def changed_message(text: str, chat: Conversation) -> int | None:
    """Return the index of the first message whose text is not in ``text``, the rendered messages up to the last answer,
    None if all are: a template may leave out or change a message. Reasoning of earlier answers may be missing."""
    last = _answers(chat)[-1]
    for number, message in enumerate(chat.messages[: last + 1]):
        content = message.get("content")
        if not isinstance(content, str) or message["role"] == "tool":  # may be written as JSON
            continue
        pieces = re.split("</?think>", content) if message["role"] == "assistant" else [content]
        pieces = [*pieces, read_reasoning(message)] if number == last else pieces[-1:]
        if not all(piece.strip() in text for piece in pieces):
            return number
    return None


def _tokens_of_spans(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Tokens:
    """Return the tokens of ``text``, as it is tokenized in one piece. Those that begin and end in a span are in the
    loss, and those that cross its border."""
    cuts = sorted({0, len(text), *(cut for span in spans for cut in span)})
    full, *pieces = tokenizer.tokenize_sentences([text, *(text[a:b] for a, b in zip(cuts, cuts[1:]))], False)
    ids = full.astype(np.int64)
    trained = np.zeros(len(ids), dtype=bool)
    if np.array_equal(np.concatenate([ids[:0], *pieces]), ids):
        places = dict(zip(cuts, np.cumsum([0, *map(len, pieces)]).tolist()))
        for start, stop in spans:
            trained[places[start] : places[stop]] = True
        return Tokens(ids, trained)
    offsets = tokenizer.token_offsets(text)
    for start, stop in spans:
        trained |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return Tokens(ids, trained)


def _runs(trained: np.ndarray) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))
