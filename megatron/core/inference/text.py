"""Text of a stream of tokens: incremental detokenization, and stop strings. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base import Tokenizer

CONTEXT = 4
"""Tokens of the prompt that are decoded with the text, so that SentencePiece keeps the space between them."""
UNKNOWN = "\ufffd"
MAX_HELD = 3
"""Bytes of an incomplete UTF-8 character, each of which may be decoded to U+FFFD."""


class TextStream:
    """Text of tokens as they are generated after ``prompt``, up to the first of ``stops``.

    The pieces that :meth:`push` and :meth:`finish` return add up to the text. Held back are characters whose bytes are
    incomplete, and beginnings of stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self.stopped = False
        """Whether a stop string was found; later tokens are ignored."""
        context = list(prompt[-CONTEXT:])
        text = tokenizer.detokenize(context) if context else ""
        if text.endswith(UNKNOWN):
            context, text = [], ""
        self._ids, self._text = context, ""
        self._start, self._anchor = 0, len(context)
        """Tokens from ``_start`` are decoded; those before ``_anchor`` are complete and serve as context."""
        self._done = len(text)
        """Characters of the decoded tokens that were passed on."""

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes."""
        if self.stopped:
            return ""
        self._ids.append(token)
        decoded = self._tokenizer.detokenize(self._ids[self._start :])
        held = min(len(decoded) - len(decoded.rstrip(UNKNOWN)), MAX_HELD)
        stable = decoded[: len(decoded) - held]
        piece, self._done = stable[self._done :], max(self._done, len(stable))
        if not held:
            self._start, self._anchor = self._anchor, len(self._ids)
            self._done = len(self._tokenizer.detokenize(self._ids[self._start :]))
        return self._release(piece)

    def finish(self) -> str:
        """Return the rest of the text, which has ended."""
        if self.stopped:
            return ""
        decoded = self._tokenizer.detokenize(self._ids[self._start :])
        text = self._release(decoded[self._done :])
        rest, self._text, self._done = ("" if self.stopped else self._text), "", len(decoded)
        return text + rest

    def _release(self, piece: str) -> str:
        """Append ``piece``; return the text before a stop string, or that cannot be the beginning of one."""
        self._text += piece
        found = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._text[: min(found)]
        keep = max((_overlap(self._text, stop) for stop in self._stops), default=0)
        cut = len(self._text) - keep
        released, self._text = self._text[:cut], self._text[cut:]
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of ``stop`` that ends ``text``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
