"""BERT's samples: pairs of segments of one document in or out of order, or single segments, with masked words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig
from megatron.core.datasets.megatron_dataset import Sample
from megatron.data.word_masking import mask_words

KEEP_BELOW = 0.8
"""Share of masked tokens that become the mask token; half of the others become a random token."""


@dataclass(kw_only=True)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Settings of BERT's data set."""

    classification_head: bool
    """Samples are pairs for the sentence-order loss (off with --bert-no-binary-head)."""

    @property
    def num_special_places(self) -> int:
        return 3  # cls A sep B sep, also without B

    @property
    def min_sentences(self) -> int:
        return 2 if self.classification_head else 1

    @property
    def needed_roles(self) -> tuple[str, ...]:
        return ("cls", "sep", "mask")

    @cached_property
    def all_ids(self) -> list[int]:
        """The ids that random replacements are drawn from, special tokens included."""
        return sorted(self.texts)


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """See the module; arguments as for ``MaskedWordPieceDataset``.

    ``dataset[i]`` is a dict of int64[s] arrays: ``text`` (cls A sep B sep, masked, then 0), ``types`` (0 up to the
    first sep, 1 up to the second, then 0), ``labels`` (the original id where masked, else -1), ``loss_mask`` (1 where
    masked), ``padding_mask`` (1 on real tokens, by length), and ints: ``is_random`` (1: B came first in the
    document), ``truncated`` (1: tokens were dropped)."""

    config: BERTMaskedWordPieceDatasetConfig
    takes_empty_samples = True  # cls and sep remain, and no label

    def __getitem__(self, idx: int) -> Sample:
        tokens, lengths, target = self.sentences(idx)
        random_state = self.random_state(idx)
        first, second, is_random = self._pair(tokens, lengths, random_state)
        truncated = len(tokens) > target
        if truncated:
            first, second = truncate_pair(first, second, target, random_state)
        cls, sep = self.ids["cls"], self.ids["sep"]
        text = np.concatenate([[cls], first, [sep], *([second, [sep]] if len(second) else [])])
        length = self.config.sequence_length
        types = np.zeros(length, dtype=np.int64)
        types[len(first) + 2 : len(text)] = 1
        labels = np.full(length, -1, dtype=np.int64)
        loss_mask = np.zeros(length, dtype=np.int64)
        spans = mask_words(text, target, self.rule, random_state, self._replacement(random_state))
        masked = [pair for span in spans for pair in span]
        if masked:
            places, replacements = (list(column) for column in zip(*masked))
            labels[places] = text[places]
            loss_mask[places] = 1
            text[places] = replacements
        if self.pad > 0:
            labels[labels == self.pad] = 0
        return {
            "text": self.padded(text, length),
            "types": types,
            "labels": labels,
            "is_random": int(is_random),
            "padding_mask": self.ones(len(text), length),
            "loss_mask": loss_mask,
            "truncated": int(truncated),
        }

    def _pair(
        self, tokens: np.ndarray, lengths: np.ndarray, random_state: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Cut at a random sentence and swap with probability 0.5. Without the classification head: (all tokens, none,
        False)."""
        if not self.config.classification_head:
            return tokens, tokens[:0], False
        pivot = random_state.randint(1, len(lengths)) if len(lengths) >= 3 else 1
        cut = int(lengths[:pivot].sum())
        before, after = tokens[:cut], tokens[cut:]
        if random_state.random_sample() < 0.5:
            return after, before, True
        return before, after, False

    def _replacement(self, random_state: np.random.RandomState) -> Callable[[int], Any]:
        uniform, randint = random_state.random_sample, random_state.randint
        mask, ids = self.ids["mask"], self.config.all_ids

        def replace(index: int) -> Any:
            if uniform() < KEEP_BELOW:
                return mask
            return ids[randint(0, len(ids))] if uniform() >= 0.5 else index

        return replace


def truncate_pair(
    first: np.ndarray, second: np.ndarray, target: int, random_state: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Return views that together have ``target`` tokens; tokens are removed from a random end of the longer segment."""
    bounds = [[0, len(first)], [0, len(second)]]
    excess = len(first) + len(second) - target
    for from_start in (random_state.random_sample(excess) < 0.5).tolist():
        longer = bounds[0] if bounds[0][1] - bounds[0][0] > bounds[1][1] - bounds[1][0] else bounds[1]
        if from_start:
            longer[0] += 1
        else:
            longer[1] -= 1
    return first[slice(*bounds[0])], second[slice(*bounds[1])]
