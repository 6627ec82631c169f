"""From documents to samples, as Megatron-LM's GPT data sets define it (docs/reference/data_format.md).

A corpus is a list of documents, arrays of token ids. Splits take them in file order; a data set lays shuffled epochs
end to end and cuts every s tokens; blends draw from several data sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.reference.settings import Settings

Corpus = list  # of int arrays


def cut(c: Settings, documents: Corpus, expected: int | None) -> list:
    """Return samples of s + 1 tokens in training order: at least ``wanted``, or one epoch."""
    length, seed = c.seq_length, c.seed
    per_epoch = sum(map(len, documents))
    epochs = 1 if expected is None else max(1, math.ceil((expected * length + 1) / per_epoch))
    before_last = ((epochs - 1) * per_epoch - 1) // length
    apart = epochs > 1 and expected - before_last < int(0.80 * ((per_epoch - 1) // length))
    random = np.random.RandomState(seed)
    order = np.tile(np.arange(len(documents)), epochs)
    first = len(order) - len(documents) if apart else len(order)
    order = _shuffled(order, first, random)
    tokens = np.concatenate([documents[index] for index in order])
    count = (len(tokens) - 1) // length
    samples = [tokens[i * length : (i + 1) * length + 1] for i in range(count)]
    return [samples[i] for i in _shuffled(np.arange(count), before_last if apart else count, random)]


def _shuffled(order, first: int, random: np.random.RandomState):
    """Shuffle ``order[:first]``, then the rest, separately; return them joined."""
    parts = [order[:first].copy(), order[first:].copy()]
    for part in parts[: 2 if len(order) > first else 1]:
        random.shuffle(part)
    return np.concatenate(parts)


def blend(sets: list[list], weights: list[float], size: int) -> list:
    """Draw at step k from the set with the largest deficit w max(k, 1) - taken."""
    selected, result = [0] * len(sets), []
    for step in range(size):
        errors = [weight * max(step, 1) - count for weight, count in zip(weights, selected)]
        chosen = errors.index(max(errors))
        result.append(sets[chosen][selected[chosen]])
        selected[chosen] += 1
    return result


def split_of(documents: Corpus, shares: tuple, which: int) -> Corpus:
    """Part ``which`` of train, valid, test; boundaries are rounded, halves to even."""
    edges = [sum(shares[:part]) / sum(shares) for part in (which, which + 1)]
    first, last = (round(edge * len(documents)) for edge in edges)
    return documents[first:last]


def samples_of(c: Settings, corpora: dict[str, Corpus], which: int, expected: int | None, make: Callable) -> list[list]:
    """The data sets of a split (0 train, 1 valid, 2 test): one, or several under --multiple-validation-sets; ``make``
    is ``cut`` or another model's equivalent."""
    local = (c.train_data_path, c.valid_data_path, c.test_data_path)[which]
    source = c.data_path if local is None else local
    if source is None or expected == 0:
        return []
    entries = source if isinstance(source, list) else [source]
    names = [entry for entry in entries if isinstance(entry, str)]
    weights = [entry for entry in entries if not isinstance(entry, str)]
    shares = (1.0, 0.0, 0.0) if local is not None else c.split
    parts = [split_of(corpora[name], shares, 0 if local is not None else which) for name in names]
    if not any(parts):
        return []
    if which == 1 and c.multiple_validation_sets:
        return [make(c, part, expected) for part in parts]
    if weights:
        shares = [weight / sum(weights) for weight in weights]
        counts = [math.ceil(expected * share) for share in shares]
        room = 1 + c.mid_level_dataset_surplus
        sets = [make(c, part, math.ceil(count * room)) for part, count in zip(parts, counts)]
        return [blend(sets, shares, sum(counts))]
    if len(parts) == 1:
        return [make(c, parts[0], expected)]
    sets = [make(c, part, None) for part in parts]  # each once, interleaved by size
    total = sum(map(len, sets))
    return [blend(sets, [len(item) / total for item in sets], total if expected is None else min(expected, total))]


@dataclass
class Batch:
    """Arrays [b, s] of samples laid one above the other."""

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    """Index of each token's document, for attention; an end-of-document token belongs to the document that it
    ends."""
    samples: np.ndarray
    """[b]: place in the training stream."""


def batch_of(c: Settings, rows: list, first: int) -> Batch:
    """``rows`` of s + 1 tokens that are samples ``first`` and on of the stream."""
    text = np.stack(rows).astype(np.int64)
    tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()
    eod = c.vocab_size - 1 if c.null_tokenizer_eod_id is None else c.null_tokenizer_eod_id
    mask, ends = np.ones(tokens.shape), tokens == eod
    if c.eod_mask_loss:
        mask[ends] = 0.0
    begins = np.concatenate((np.zeros_like(ends[:, :1]), ends[:, :-1]), axis=1)  # behind an end
    positions = np.tile(np.arange(c.seq_length), (len(tokens), 1))
    if c.reset_position_ids:
        positions = positions - np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
    documents = np.cumsum(begins, axis=1) if c.reset_attention_mask else np.zeros_like(tokens)
    pad = c.null_tokenizer_pad_id
    if pad >= 0 and (pad != eod or c.allow_ambiguous_pad_tokens):
        mask[labels == pad] = 0.0
        labels[labels == pad] = 0
        tokens[tokens == pad] = 0
    return Batch(tokens, labels, mask, positions, documents, np.arange(first, first + len(rows)))
