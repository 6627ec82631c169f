"""Samples of BERT and T5 from documents, as Megatron-LM's masked data sets define them.

A document is a list of sentences, arrays of token ids. Runs of whole sentences become samples; words of a sample
are masked (Devlin et al. 2018; n-grams of whole words), of BERT's in place, of T5's as spans that sentinels stand for
(Raffel et al. 2020). All numbers come from two Mersenne twisters (Matsumoto and Nishimura 1998; numpy's RandomState is
the one of 32 bits) and numpy's ways to draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

LONGEST_SENTENCE = 512
WORD = 2**64 - 1


@dataclass(frozen=True)
class Vocabulary:
    """The text of every id, and the ids that samples need."""

    texts: dict[int, str]
    cls: int
    sep: int
    mask: int
    pad: int
    bos: int
    eos: int
    sentinels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Masking:
    """Share of the tokens, and how many words are masked together: n words with a weight of 1/n, or geometric."""

    probability: float = 0.15
    most_words: int = 3
    whole_words: bool = True
    longer: bool = False
    geometric: bool = False


# ---- which sentences make a sample


def sample_map(sizes: list[list[int]], expected: int | None, length: int, short: float, seed: int, least: int) -> list:
    """Return (document, first sentence, last sentence + 1, target length) of each sample, in training order.

    ``sizes`` are the lengths of each document's sentences. Whole epochs, at least ``wanted`` samples, or one epoch; a
    sample has at least ``least`` sentences where the document's end does not cut it short.
    """
    random, rows, ratio = np.random.RandomState(seed), [], int(1 / short + 0.5) if short else 0

    def target() -> int:
        draw = int(random.randint(0, 2**32, dtype=np.uint32)) if ratio else 0
        return length if not ratio or draw % ratio else 2 + draw % (length - 1)

    while not rows or len(rows) < (expected or 0):
        for document, sentences in enumerate(sizes):
            if len(sentences) < least or len(sentences) > 1 and max(sentences) > LONGEST_SENTENCE:
                continue
            first, goal = 0, target()
            for end in range(1, len(sentences) + 1):
                left = len(sentences) - end
                if left == 0 or left > 1 and end - first >= least and sum(sentences[first:end]) >= goal:
                    rows.append((document, first, end, goal))
                    first, goal = end, target()
        assert rows, "no document has enough sentences"
    draws = mersenne_twister_64(seed + 1)
    for last in range(len(rows) - 1, 0, -1):
        other = next(draws) % (last + 1)
        rows[last], rows[other] = rows[other], rows[last]
    return rows


def mersenne_twister_64(seed: int) -> Iterator[int]:
    """Words of std::mt19937_64."""
    state = [seed]
    for i in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ state[-1] >> 62) + i) & WORD)
    while True:
        for i in range(312):
            joined = state[i] & ~0x7FFFFFFF | state[(i + 1) % 312] & 0x7FFFFFFF
            state[i] = state[(i + 156) % 312] ^ joined >> 1 ^ (joined & 1) * 0xB5026F5AA96619E9
        for x in state.copy():
            x ^= x >> 29 & 0x5555555555555555
            x ^= x << 17 & 0x71D67FFFEDA60000
            x ^= x << 37 & 0xFFF7EEE000000000
            yield x ^ x >> 43


# ---- masking


def masked(tokens: list[int], target: int, random, v: Vocabulary, how: Masking, replacement: Callable) -> list[dict]:
    """Masks ``tokens`` in place. Spans in order of their positions: {position: original id}."""
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in (v.cls, v.sep):
            continue
        if how.whole_words and words and v.texts[token].startswith("##"):
            words[-1].append(position)
        else:
            words.append([position])
    weights = np.array([1 / n for n in range(1, how.most_words + 1)])
    weights = (weights / weights.sum())[:: -1 if how.longer else 1]
    most = min(how.probability * target, max(1, round(len(tokens) * how.probability)))
    starts, spans, selected = list(range(len(words))), [], 0
    random.shuffle(starts)
    for start in starts:
        if selected >= most:
            break
        if how.geometric:
            n = min(random.geometric(0.2), how.most_words)
        else:
            n = random.choice(np.arange(1, how.most_words + 1), p=weights / weights.sum())
        options = [sum(words[start : start + count], []) for count in range(n, 0, -1)]
        span = next((option for option in options if selected + len(option) <= most), [])
        if any(position in earlier for earlier in spans for position in span) or not span:
            continue
        spans.append({position: tokens[position] for position in span})
        for position in span:
            tokens[position] = replacement(tokens[position])
        selected += len(span)
    return sorted(spans, key=min)


# ---- samples


def padded(values, length: int, filler: int):
    assert len(values) <= length
    return np.array([*values, *[filler] * (length - len(values))], dtype=np.int64)


def bert_sample(sentences: list, target: int, length: int, seed: int, v: Vocabulary, how: Masking, pair: bool) -> dict:
    """Return a sample of two segments of a document, in order or swapped (Lan et al. 2019), or of one segment. Masked
    tokens become the mask id (80 %), a random id (10 %; padding ids then count as text) or stay unchanged."""
    random, swapped = np.random.RandomState(seed % 2**32), False
    first, second = [token for sentence in sentences for token in sentence], []
    if pair:
        pivot = random.randint(1, len(sentences)) if len(sentences) > 2 else 1
        cut = sum(map(len, sentences[:pivot]))
        first, second = first[:cut], first[cut:]
        if swapped := bool(random.random_sample() < 0.5):
            first, second = second, first
    truncated = len(first) + len(second) > target
    while len(first) + len(second) > target:
        (first if len(first) > len(second) else second).pop(0 if random.random_sample() < 0.5 else -1)
    tokens = [v.cls, *first, v.sep, *second, *[v.sep] * bool(second)]
    types = [0] * (len(first) + 2) + [1] * (len(second) + bool(second))
    ids = sorted(v.texts)

    def replacement(token: int) -> int:
        if random.random_sample() < 0.8:
            return v.mask
        return ids[random.randint(0, len(ids))] if random.random_sample() >= 0.5 else token

    labels = np.full(length, -1)
    for span in masked(tokens, target, random, v, how, replacement):
        labels[list(span)] = list(span.values())
    text = padded(tokens, length, v.pad)
    return {
        "text": np.where(text == v.pad, 0, text),
        "types": padded(types, length, 0),
        "labels": np.where(labels == v.pad, 0, labels),
        "is_random": int(swapped),
        "padding_mask": padded([1] * len(tokens), length, 0),
        "loss_mask": (labels != -1).astype(np.int64),
        "truncated": int(truncated),
    }


def t5_sample(sentences: list, target: int, lengths: tuple, seed: int, v: Vocabulary, how: Masking) -> dict:
    """Return a sample: the encoder reads the text with a sentinel for each masked span, the decoder each sentinel and
    its span. ``lengths``: of encoder and decoder."""
    random = np.random.RandomState(seed % 2**32)
    text = [token for sentence in sentences for token in sentence]
    tokens = text[:target]
    spans = masked(tokens, target, random, v, how, lambda token: v.mask)
    assert len(spans) <= len(v.sentinels)
    encoder, rest, decoder = [], 0, [v.bos]
    for sentinel, span in zip(v.sentinels, spans):
        encoder += [*tokens[rest : min(span)], sentinel]
        rest = max(span) + 1
        decoder += [sentinel, *span.values()]
    encoder += tokens[rest:]
    text_enc, text_dec = (padded(item, length, v.pad) for item, length in zip((encoder, decoder), lengths))
    labels = padded([*decoder[1:], v.eos], lengths[1], -1)
    return {
        "text_enc": np.where(text_enc == v.pad, 0, text_enc),
        "text_dec": np.where(text_dec == v.pad, 0, text_dec),
        "labels": np.where(labels == v.pad, 0, labels),
        "loss_mask": padded([1] * len(decoder), lengths[1], 0),
        "enc_mask": (text_enc != v.pad).astype(np.int64),
        "dec_mask": (text_dec != v.pad).astype(np.int64),
        "truncated": int(len(text) > target),
    }


# ---- data sets


def bert_samples(documents: list, wanted: int | None, length: int, short: float, seed: int, v: Vocabulary, how: Masking,
                 pair: bool) -> list[dict]:  # fmt: skip
    """A data set in training order; cls and two seps are kept free."""
    rows = sample_map(_sizes(documents), wanted, length - 3, short, seed, 2 if pair else 1)
    return [bert_sample(documents[row][first:end], target, length, seed + index, v, how, pair)
            for index, (row, first, end, target) in enumerate(rows)]  # fmt: skip


def t5_samples(documents: list, expected: int | None, lengths: tuple, short: float, seed: int, v: Vocabulary,
               how: Masking) -> list[dict]:  # fmt: skip
    rows = sample_map(_sizes(documents), expected, lengths[0] - 2, short, seed, 1)
    return [t5_sample(documents[row][first:end], target, lengths, seed + index, v, how)
            for index, (row, first, end, target) in enumerate(rows)]  # fmt: skip


def _sizes(documents: list) -> list[list[int]]:
    return [[len(sentence) for sentence in document] for document in documents]
