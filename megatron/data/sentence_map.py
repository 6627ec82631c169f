"""The sentences of each sample: the sample order of BERT, T5 and retrieval data sets.

Sentences of a document are joined until a sample has its target length, which is the whole length or, with a
probability, a random shorter one; epochs are appended until there are samples enough, and all rows are shuffled. Same
rows as Megatron-LM. The arithmetic runs in C++ (``helpers.cpp``) where the extension was built, else in Python; both
return the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError
from megatron.data import helpers

LONG_SENTENCE = 512
"""A document of several sentences gives no samples if one sentence has more tokens than this."""

UNLIMITED = 2**64 - 1
_WORDS_AT_ONCE = 4096
_UINT32_MAX = np.iinfo(np.uint32).max

Target = Callable[[int], int]


class NoSamplesError(UserError):
    """No document can give a sample."""


def build_mapping(
    docs: np.ndarray,
    sizes: np.ndarray,
    num_epochs: int,
    max_num_samples: int | None,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int = 2,
) -> np.ndarray:
    """Return the samples of BERT and T5 in shuffled order: runs of sentences of one document of about a target length.

    Args:
        docs: int64[d + 1], the first sentence of each document, then the number of sentences.
        sizes: int32[n], tokens of every sentence of the file.
        num_epochs: passes over the documents at most.
        max_num_samples: no further epoch begins once this many samples exist, but a begun one is completed; None: only
            ``num_epochs`` limits them.
        max_seq_length: target length in tokens, at least 2.
        short_seq_prob: one in ``round(1 / short_seq_prob)`` targets is shorter, from 2 tokens on.
        seed: for the target lengths; the shuffle uses ``seed + 1``.
        min_num_sent: sentences that a document needs, and a sample.

    Returns:
        [samples, 3]: first sentence, last sentence + 1, target length; uint32, or uint64 where ``sizes`` has
        2^32 entries or more. A sample may exceed its target by a part of its last sentence, and may be shorter.

    Raises:
        NoSamplesError: a ``ValueError``; not one document gives a sample.
        UserError: malformed ``docs``, or a number out of range."""
    bounds, sizes = _checked(docs, sizes, num_epochs, max_seq_length, least=2)
    if not 0 <= short_seq_prob <= 1:
        raise UserError(f"--short-seq-prob {short_seq_prob}: a probability lies between 0 and 1")
    ratio = math.floor(1 / short_seq_prob + 0.5) if short_seq_prob > 0 else 0  # halves away from zero, as C rounds
    most = UNLIMITED if max_num_samples is None else int(max_num_samples)
    build = helpers.compiled(f"build_mapping_{_row_type(sizes).__name__}") or build_mapping_numpy
    rows = build(bounds, sizes, num_epochs, most, max_seq_length, min(ratio, 2**33), seed, min_num_sent)
    if most and not len(rows):
        raise NoSamplesError(no_samples_reason(bounds, sizes, min_num_sent))
    return rows


def build_blocks_mapping(
    docs: np.ndarray,
    sizes: np.ndarray,
    titles_sizes: np.ndarray,
    num_epochs: int,
    max_num_samples: int | None,
    max_seq_length: int,
    seed: int,
    use_one_sent_blocks: bool = False,
) -> np.ndarray:
    """Blocks of evidence for retrieval: as ``build_mapping``, with a target of ``max_seq_length`` less the document's
    title (``titles_sizes`` int32[d]), none of them short.

    Returns:
        [blocks, 4]: first sentence, last sentence + 1, number of the document within ``docs``, number of the
        block within its epoch; dtype as there.

    Raises:
        NoSamplesError: a ``ValueError``; not one document gives a block."""
    bounds, sizes = _checked(docs, sizes, num_epochs, max_seq_length, least=1)
    titles = helpers.aligned(titles_sizes, np.int32)
    if len(titles) != len(bounds) - 1:
        raise UserError(f"{len(titles)} sizes of titles for {len(bounds) - 1} documents")
    least = 1 if use_one_sent_blocks else 2
    most = UNLIMITED if max_num_samples is None else int(max_num_samples)
    build = helpers.compiled(f"build_blocks_mapping_{_row_type(sizes).__name__}") or build_blocks_mapping_numpy
    rows = build(bounds, sizes, titles, num_epochs, most, max_seq_length, seed, least)
    if most and not len(rows):
        raise NoSamplesError(no_samples_reason(bounds, sizes, least))
    return rows


def long_documents(bounds: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """bool[documents]: has a sentence of more than ``LONG_SENTENCE`` tokens."""
    first = int(bounds[0])
    before = np.concatenate([[0], np.cumsum(sizes[first : int(bounds[-1])] > LONG_SENTENCE)])
    return before[bounds[1:] - first] > before[bounds[:-1] - first]


def gives_samples(bounds: np.ndarray, sizes: np.ndarray, min_num_sent: int) -> np.ndarray:
    """Return bool[documents]: True if it has enough sentences and, if it has several, no sentence is too long."""
    counts = np.diff(bounds)
    return (counts >= max(1, min_num_sent)) & ((counts < 2) | ~long_documents(bounds, sizes))


def no_samples_reason(bounds: np.ndarray, sizes: np.ndarray, min_num_sent: int) -> str:
    """Return why no document gives a sample, with counts: too few sentences, or a sentence longer than the limit. Does
    not check that this is the case: each document with enough sentences counts as one with a long sentence."""
    counts = np.diff(bounds)
    few = int((counts < min_num_sent).sum())
    rest = len(counts) - few
    parts = [f"{few} have fewer than {min_num_sent} sentence(s)"] if few or not rest else []
    parts += [f"{rest} have a sentence of more than {LONG_SENTENCE} tokens"] if rest else []
    return f"no sample can be made: of {len(counts)} documents {' and '.join(parts)}"


def build_mapping_numpy(
    bounds: np.ndarray,
    sizes: np.ndarray,
    num_epochs: int,
    max_samples: int,
    max_length: int,
    short_ratio: int,
    seed: int,
    min_sentences: int,
) -> np.ndarray:
    """Return the same shuffled rows as ``build_mapping`` in C++: (first sentence, end, target length). Ends after the
    epoch that reaches ``max_samples``, or one that adds none; a target is short once in ``short_ratio``."""
    draws = _words(np.random.RandomState(seed % 2**32))

    def target(document: int) -> int:
        if short_ratio == 0:
            return max_length
        draw = next(draws)
        return 2 + draw % (max_length - 1) if draw % short_ratio == 0 else max_length

    rows: list[tuple[int, ...]] = []
    for _ in range(num_epochs):
        before = len(rows)
        if before >= max_samples:
            break
        groups = _group_sentences(bounds.tolist(), sizes, target, min_sentences, min_left=2, long_from=2)
        rows += [(first, end, goal) for _, first, end, goal in groups]
        if len(rows) == before:
            break
    return _shuffled(rows, 3, _row_type(sizes), seed + 1)


def build_blocks_mapping_numpy(
    bounds: np.ndarray,
    sizes: np.ndarray,
    title_sizes: np.ndarray,
    num_epochs: int,
    max_samples: int,
    max_length: int,
    seed: int,
    min_sentences: int,
) -> np.ndarray:
    """Return the same shuffled rows as ``build_blocks_mapping`` in C++: (first sentence, end, document, block number
    within the epoch). Targets are ``max_length`` minus the length of the document's title."""
    titles = title_sizes.tolist()
    least = min_sentences
    groups = list(_group_sentences(bounds.tolist(), sizes, lambda i: max_length - titles[i], least, least, least))
    epoch = [(first, end, document, block) for block, (document, first, end, _) in enumerate(groups)]
    epochs = min(num_epochs, -(-max_samples // len(epoch))) if epoch else 0
    return _shuffled(epoch * epochs, 4, _row_type(sizes), seed + 1)


def _group_sentences(
    bounds: list[int], sizes: np.ndarray, target: Target, min_sentences: int, min_left: int, long_from: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (document, first sentence, last sentence + 1, target) of one epoch. A sample ends at its target if it has
    ``min_sentences`` and leaves ``min_left``. Calls ``target`` once per sample, and once more per document."""
    for document, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        lengths = sizes[begin:end].tolist()
        if len(lengths) < min_sentences or (len(lengths) >= long_from and max(lengths, default=0) > LONG_SENTENCE):
            continue
        goal, first, tokens = target(document), begin, 0
        for sentence, length in enumerate(lengths, begin):
            tokens += length
            left, count = end - 1 - sentence, sentence + 1 - first
            if (tokens >= goal and left >= min_left and count >= min_sentences) or left == 0:
                yield document, first, sentence + 1, goal
                first, tokens = sentence + 1, 0
                goal = target(document)  # also after the document's last sample: this draw is not used


def _words(random_state: np.random.RandomState) -> Iterator[int]:
    while True:
        yield from random_state.randint(0, 2**32, size=_WORDS_AT_ONCE, dtype=np.uint32).tolist()


def _shuffled(rows: list[Any], width: int, dtype: type, seed: int) -> np.ndarray:
    words = mt19937_64(seed)
    for i in range(len(rows) - 1, 0, -1):
        j = next(words) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return np.array(rows, dtype=dtype).reshape(-1, width)


def mt19937_64(seed: int) -> Iterator[int]:
    """Yield the outputs (ints) of C++'s 64-bit Mersenne twister (Nishimura and Matsumoto 2004)."""
    size, middle = 312, 156
    first = [seed % 2**64]
    for i in range(1, size):
        first.append((6364136223846793005 * (first[-1] ^ (first[-1] >> 62)) + i) % 2**64)
    state = np.array(first, dtype=np.uint64)
    upper, matrix = np.uint64(0xFFFFFFFF80000000), np.uint64(0xB5026F5AA96619E9)
    shift = [np.uint64(count) for count in (29, 17, 37, 43, 1)]
    while True:
        # the second half needs the first half's new words, and its last word the new first one
        for low, high in ((0, middle), (middle, size)):
            successors = np.append(state[low + 1 : high], state[high % size])
            mixed = (state[low:high] & upper) | (successors & ~upper)
            other = state[middle:] if low == 0 else state[:middle]
            state[low:high] = other ^ (mixed >> shift[4]) ^ ((mixed & np.uint64(1)) * matrix)
        words = state ^ ((state >> shift[0]) & np.uint64(0x5555555555555555))
        words ^= (words << shift[1]) & np.uint64(0x71D67FFFEDA60000)
        words ^= (words << shift[2]) & np.uint64(0xFFF7EEE000000000)
        yield from (words ^ (words >> shift[3])).tolist()


def _row_type(sizes: np.ndarray) -> type:
    return np.uint32 if len(sizes) <= _UINT32_MAX else np.uint64


def _checked(
    docs: np.ndarray, sizes: np.ndarray, num_epochs: int, max_seq_length: int, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays contiguous as C++ reads them. Raises UserError for bounds that decrease or exceed the sentences."""
    if num_epochs < 1 or max_seq_length < least:
        raise UserError(f"num_epochs {num_epochs}, max_seq_length {max_seq_length}: at least 1 and {least} are needed")
    bounds = helpers.aligned(docs, np.int64)
    if not len(bounds) or bounds[0] < 0 or bounds[-1] > len(sizes) or (np.diff(bounds) < 0).any():
        raise UserError(f"the bounds of documents do not ascend within the {len(sizes)} sentences of the file")
    return bounds, helpers.aligned(sizes, np.int32)
