"""Text of a stream of tokens: incremental detokenization, and stop strings. Torch-free."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from megatron.core.tokenizers.base import UNKNOWN, Tokenizer

CONTEXT = 4
"""Tokens of the prompt that are decoded with the text, so that SentencePiece keeps the space between them."""


class Detokenizer:
    """Text of tokens as they come after ``prompt``. The pieces that :meth:`push` and :meth:`finish` return add up to
    the text; a character whose bytes are incomplete is held back."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        context = list(prompt[-CONTEXT:])
        text = tokenizer.detokenize(context) if context else ""
        if text.endswith(UNKNOWN):
            context, text = [], ""
        self._ids = context
        self._start, self._anchor = 0, len(context)
        """Tokens from ``_start`` are decoded; those before ``_anchor`` are complete and serve as context."""
        self._num_passed = len(text)
        """Characters of the decoded tokens that were passed on."""
        self._utf8 = getincrementaldecoder("utf-8")(errors="replace")
        self._num_invalid = 0
        """Invalid bytes at the end of the complete characters."""
        self.num_characters = 0
        """Number of characters that were passed on."""

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes."""
        self._ids.append(token)
        complete = self._utf8.decode(self._tokenizer.token_bytes(token))
        num_invalid = len(complete) - len(complete.rstrip(UNKNOWN))
        self._num_invalid = num_invalid + (self._num_invalid if num_invalid == len(complete) else 0)
        decoded = self._tokenizer.detokenize(self._ids[self._start :])
        if num_held := len(self._utf8.getstate()[0]):
            # byte fallback decodes complete characters before an incomplete one to U+FFFD, too
            num_before = len(decoded.rstrip(UNKNOWN))
            decoded = decoded[: max(min(num_before + self._num_invalid, len(decoded) - num_held), num_before)]
        piece = self._pass_on(decoded)
        if not num_held:
            self._start, self._anchor = self._anchor, len(self._ids)
            self._num_passed = len(self._tokenizer.detokenize(self._ids[self._start :]))
        return piece

    def finish(self) -> str:
        """Return the rest of the text, which has ended."""
        return self._pass_on(self._tokenizer.detokenize(self._ids[self._start :]))

    def _pass_on(self, decoded: str) -> str:
        piece, self._num_passed = decoded[self._num_passed :], max(self._num_passed, len(decoded))
        self.num_characters += len(piece)
        return piece


class TextStream:
    """Text of tokens as they are generated after ``prompt``, up to the first of ``stops``. The pieces that :meth:`push`
    and :meth:`finish` return add up to it. Held back: characters whose bytes are incomplete, and beginnings of stop
    strings."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer, prompt), stops
        self._text = ""
        self.stopped = False
        """Whether a stop string was found; later tokens are ignored."""
        self.num_released = 0
        """Number of characters that were returned."""

    @property
    def num_characters(self) -> int:
        """Number of complete characters, those that may begin a stop string included."""
        return self._detokenizer.num_characters

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes."""
        return "" if self.stopped else self._release(self._detokenizer.push(token))

    def finish(self) -> str:
        """Return the rest of the text, which has ended."""
        if self.stopped:
            return ""
        text = self._release(self._detokenizer.finish())
        rest, self._text = ("" if self.stopped else self._text), ""
        self.num_released += len(rest)
        return text + rest

    def _release(self, piece: str) -> str:
        """Append ``piece``; return the text before a stop string, or that cannot be the beginning of one."""
        self._text += piece
        ends = [index for stop in self._stops if (index := self._text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            cut = min(ends)
        else:
            cut = len(self._text) - max((_overlap(self._text, stop) for stop in self._stops), default=0)
        released, self._text = self._text[:cut], self._text[cut:]
        self.num_released += len(released)
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of ``stop`` that ends ``text``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
