"""Preference pairs: a preferred and a rejected completion of one prompt.

- ``{"prompt", "chosen", "rejected", "tools"}``, three texts or three lists of messages
- ``{"chosen", "rejected", "tools"}``, two texts or two lists of messages; the prompt is their common beginning

Sequences have the tokens and masks of conversations; the sequences 2k and 2k + 1 are the chosen and the rejected one of
pair k. ``prepared(path, tokenizer, folder, PREFERENCES)`` reads a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from megatron.core.config.errors import UserError, listed
from megatron.core.datasets.conversations.formats import Conversation, Line, Pair, Text, checked_messages, read_tools
from megatron.core.datasets.conversations.masks import Tokens
from megatron.core.datasets.conversations.prepare import Reader, Report, item_sequences
from megatron.core.tokenizers.base import Tokenizer

KEYS = ("chosen", "rejected")
OPTIONAL = ("prompt", "tools")


def read_pair(line: Line, report: Report, number: int) -> Iterator[Pair]:
    """Yield the pair of a JSON object; nothing, counted, if both completions are equal. UserError for another form."""
    missing = [key for key in KEYS if key not in line]
    if missing:
        keys = listed(sorted(map(str, line)), most=8) or "no keys"
        raise UserError(f"has no {' and no '.join(missing)} (it has {keys}); a preference pair has chosen and rejected")
    for key in sorted(line.keys() - {*KEYS, *OPTIONAL}):
        report.count(f"key {key}", number)
    report.formats.setdefault("preference pairs", number)
    chosen, rejected = (line[key] for key in KEYS)
    prompt = line.get("prompt")
    values = [chosen, rejected, *([] if prompt is None else [prompt])]
    if not all(isinstance(value, str) for value in values) and not all(isinstance(value, list) for value in values):
        fix = "" if isinstance(prompt, list | None) else "; if chosen and rejected contain the prompt, remove prompt"
        raise UserError(f"prompt, chosen and rejected: must all be texts, or all lists of messages{fix}")
    if chosen == rejected:
        report.count("equal", number)
    elif isinstance(chosen, str):
        yield _texts(prompt, chosen, rejected)
    else:
        yield _conversations(line, prompt, chosen, rejected)


def _texts(prompt: str | None, chosen: str, rejected: str) -> Pair:
    if prompt is None:
        common = os.path.commonprefix([chosen, rejected])
        # ends before the word in which the texts differ, and before its space: they are one token
        match = re.search(r"\s?\S*\Z", common)
        prompt = common[: match.start()] if match else ""
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return Pair(Text(chosen, prompt), Text(rejected, prompt))


def _conversations(
    line: Line, prompt: Sequence[object] | None, chosen: Sequence[object], rejected: Sequence[object]
) -> Pair:
    if prompt is None:
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected)))
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    first, tools = len(prompt), read_tools(line)
    chats = []
    for name, completion in zip(KEYS, (chosen, rejected)):
        messages = checked_messages([*prompt, *completion], f"prompt and {name}")
        if len(messages) == first or messages[first]["role"] != "assistant":
            role = messages[first]["role"] if len(messages) > first else "nothing"
            raise UserError(
                f"{name}: has {role} after the prompt; both completions must begin with an assistant message"
            )
        chats.append(Conversation(messages, tools, first))
    return Pair(*chats)


def pair_sequences(tokenizer: Tokenizer, pair: Pair, report: Report, number: int) -> list[Tokens]:
    """Return the chosen and the rejected sequence; none, counted in ``report``, if one has no token with a loss. Raises
    UserError if the chat template makes several sequences of one."""
    sequences = []
    for name, item in zip(KEYS, pair):
        tokens = item_sequences(tokenizer, item, report, number)
        if len(tokens) > 1:
            raise UserError(
                f"{name}: the chat template renders its earlier answers in another way once messages follow; put "
                "them into the prompt, or give a template for training by --chat-template"
            )
        sequences += tokens
    if len(sequences) == 2:
        return sequences
    report.count("unpaired", number)
    return []


PREFERENCES = Reader("preferences", read_pair, pair_sequences)
