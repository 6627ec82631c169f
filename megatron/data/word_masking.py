"""Choice of the masked words of a sample, for BERT and T5: whole words or single pieces, separately or as n-grams.

Words are visited in shuffled order; each draws a length in words and is masked with as many of the following words as
the budget of tokens still takes, unless one of them is masked already. Every draw comes from one ``RandomState`` in a
fixed order, so that the masks equal Megatron-LM's bit for bit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

GEOMETRIC = 0.2
"""Success probability of the geometric distribution of span lengths."""

NO_LIMIT = 2**62
CONTINUATION = "##"
"""A token whose text begins so continues the word of the token before it."""


@dataclass(frozen=True)
class MaskingRule:
    """Settings: how words are found, drawn and limited."""

    probability: float
    """Share of tokens to mask."""
    max_ngram: int
    """Longest run of words that one draw masks."""
    opens_word: np.ndarray
    """bool[vocabulary]: the token opens a word."""
    never_masked: np.ndarray
    """bool[vocabulary]: the token is no part of any word."""
    geometric: bool = False
    """Draw lengths from a geometric distribution, else in proportion to 1 / length."""
    longer_ngrams: bool = False
    """Not geometric: in proportion to 1 / (max_ngram + 1 - length) instead."""
    max_spans: int = NO_LIMIT
    """Spans of a sample at most; no further word is masked then."""
    max_marked: int = NO_LIMIT
    """Masked tokens and spans of a sample, added up, at most."""

    def budget(self, num_tokens: int, target: int) -> float:
        """Maximum number of masked tokens; a real number that is not rounded."""
        return min(self.probability * target, max(1, round(num_tokens * self.probability)))

    def draw_length(self, random_state: np.random.RandomState) -> Callable[[], int]:
        """Return a function that draws how many words to mask together, from 1 to ``max_ngram``: geometric, or
        proportional to 1 / n (reversed with ``longer_ngrams``). It advances ``random_state``."""
        most = self.max_ngram
        if self.geometric:
            return lambda: min(int(random_state.geometric(GEOMETRIC)), most)
        weights = 1.0 / np.arange(1, most + 1)
        weights /= weights.sum()
        if self.longer_ngrams:
            weights = weights[::-1]
        weights = weights / weights.sum()
        cumulative = weights.cumsum()
        bounds, uniform = (cumulative / cumulative[-1]).tolist(), random_state.random_sample
        return lambda: bisect_right(bounds, uniform()) + 1  # RandomState.choice without its checks: ten times as fast


def mask_words(
    tokens: np.ndarray,
    target: int,
    rule: MaskingRule,
    random_state: np.random.RandomState,
    replace: Callable[[int], int] | None = None,
) -> list[list[tuple[int, int]]]:
    """Return the spans of ``tokens`` int64[n] to mask, from left to right: lists of (position, replacement). ``tokens``
    is not changed; ``random_state`` is advanced, also for words that do not fit. May be empty.

    Args:
        target: the length that the sample was to have, which bounds the number of masked tokens.
        replace: returns the new id for an id, drawing from ``random_state``; None: no draw, and the id stays."""
    places = np.flatnonzero(~rule.never_masked[tokens])
    opens = rule.opens_word[tokens[places]]
    opens[:1] = True
    starts = np.flatnonzero(opens).tolist()  # of each word, in ``places``
    order = np.arange(len(starts))
    random_state.shuffle(order)
    most, draw = rule.budget(len(tokens), target), rule.draw_length(random_state)
    is_masked = bytearray(len(places))
    starts += [len(places)] * rule.max_ngram  # a run that would continue after the last word ends with it
    spans: list[tuple[int, list[int]]] = []
    count = 0
    for word in order.tolist():
        if count + 1 > most or len(spans) >= rule.max_spans:  # no further word fits, and no other code draws
            break
        words, begin = draw(), starts[word]
        end = starts[word + words]
        while words and count + end - begin > most:
            words -= 1
            end = starts[word + words]
        # a word that does not fit, or meets a mask, is passed over, and its draws stay used up
        if not words or is_masked.find(1, begin, end) >= 0:
            continue
        if count + end - begin + len(spans) + 1 > rule.max_marked:
            break
        is_masked[begin:end] = b"\1" * (end - begin)
        count += end - begin
        ids = tokens[places[begin:end]].tolist()
        spans.append((begin, ids if replace is None else [replace(index) for index in ids]))
    spans.sort()
    return [list(zip(places[begin : begin + len(ids)].tolist(), ids)) for begin, ids in spans]


def expected_masks(length: int, probability: float, max_ngram: int) -> tuple[int, int]:
    """Masked tokens of a full sample, and spans if every word is one token and lengths are geometric. >>>
    expected_masks(512, 0.15, 10) (76, 18)"""
    masked = max(1, int(probability * (length - 2)))
    mean = (1 - (1 - GEOMETRIC) ** max_ngram) / GEOMETRIC  # of min(draw, max_ngram)
    return masked, math.ceil(masked / mean)
