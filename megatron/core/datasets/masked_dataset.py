"""The base of BERT's and T5's data sets: samples are whole sentences of one document with some words masked.

A sample is a function of (files, seed, number). Documents are lists of sentences, which
``tools/preprocess_data.py --split-sentences`` writes; ``--split`` divides documents. The order of samples is
``megatron.data.sentence_map``, the masks are ``megatron.data.word_masking``."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError, counted
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import EmptySplitError, MegatronDataset, Sample, special_id
from megatron.data.blend import Split
from megatron.data.index_cache import Layout
from megatron.data.indexed_dataset import IndexedDataset, resolve_prefix
from megatron.data.sentence_map import NoSamplesError, build_mapping, gives_samples, long_documents, no_samples_reason
from megatron.data.word_masking import CONTINUATION, MaskingRule

logger = logging.getLogger(__name__)

SPECIAL_ROLES = ("cls", "sep", "mask", "pad", "bos", "eos", "eod", "unk")
CHECKED_AT_ONCE = 2**16
SENTENCES = "tools/preprocess_data.py --split-sentences"


@dataclass(kw_only=True)
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of a data set with masked words. Raises UserError: a value out of range, or a tokenizer that lacks a
    token samples need; lists every problem."""

    masking_probability: float
    """Share of tokens to mask, between 0 and 1 (--mask-prob)."""

    short_sequence_probability: float
    """Share of samples that are made shorter than they could be, from 0 to 1 (--short-seq-prob)."""

    masking_max_ngram: int
    """Words masked together at most."""

    masking_do_full_word: bool
    """Mask all pieces of a word, or none."""

    masking_do_permutation: bool = False
    """Accepted as False for existing programs; Megatron-LM cannot reproduce its own permutation."""

    masking_use_longer_ngrams: bool = False
    """Prefer long n-grams to short ones."""

    masking_use_geometric_distribution: bool = False
    """Draw the number of words masked together from a geometric distribution."""

    vocab_size: int | None = None
    """Token ids must be below this; None takes the tokenizer's."""

    def __post_init__(self, s3_cache_path: str | None) -> None:
        super().__post_init__(s3_cache_path)
        if self.tokenizer is not None:
            self.check()

    def check(self) -> None:
        """UserError: no sample can be made with these values and this tokenizer. Without one, only data sets ask."""
        if problems := list(self.problems()):
            raise UserError("\n".join(problems))

    @property
    def num_special_places(self) -> int:
        """Places of a sample that no sentence may take."""
        return 0

    @property
    def min_sentences(self) -> int:
        """Sentences that a sample needs."""
        return 1

    @property
    def needed_roles(self) -> tuple[str, ...]:
        """Special tokens that samples are made with."""
        return ()

    @cached_property
    def texts(self) -> dict[int, str]:
        """The text of every id; once for all sources of a blend."""
        return self.tokenizer.inv_vocab

    @cached_property
    def opens_word(self) -> np.ndarray:
        """bool[vocabulary]: the token opens a word; any token does unless whole words are masked."""
        opens = np.ones(self.vocab_size or self.tokenizer.vocab_size, dtype=bool)
        if self.masking_do_full_word:
            opens[[index for index, text in self.texts.items() if text.startswith(CONTINUATION)]] = False
        return opens

    def problems(self) -> Iterator[str]:
        """Yield each problem with its fix."""
        if not 0 < self.masking_probability < 1:
            yield f"--mask-prob {self.masking_probability}: must lie between 0 and 1, such as 0.15"
        if not 0 <= self.short_sequence_probability <= 1:
            yield f"--short-seq-prob {self.short_sequence_probability}: must lie in 0 to 1, such as 0.1"
        if self.masking_max_ngram < 1:
            yield f"masking_max_ngram is {self.masking_max_ngram}; at least one word is masked at a time"
        if self.masking_do_permutation:
            yield "masking_do_permutation: is not available; leave it False"
        if self.sequence_length < self.num_special_places + 2:
            yield f"--seq-length {self.sequence_length}: a sample needs at least {self.num_special_places + 2} tokens"
        missing = [role for role in self.needed_roles if special_id(self.tokenizer, role) is None]
        if missing:
            kind = type(self.tokenizer).__name__
            yield (
                f"--tokenizer-type: the tokenizer ({kind}) has no token for {', '.join(missing)}, which samples have; "
                "use BertWordPieceLowerCase or BertWordPieceCase, a SentencePiece model with "
                "--tokenizer-sentencepiece-legacy, or a tokenizer that defines them"
            )


class MaskedWordPieceDataset(MegatronDataset):
    """See the module; arguments as for ``MegatronDataset``, with documents that follow one another in ``indices``.
    Raises EmptySplitError: a ValueError; no document of the split gives a sample."""

    def __init__(
        self,
        indexed_dataset: object,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: MaskedWordPieceDatasetConfig,
    ):
        """Raises UserError for problems of ``config``, EmptySplitError if the documents give no sample."""
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self.config: MaskedWordPieceDatasetConfig = config
        config.check()
        self.target_length = config.sequence_length - config.num_special_places
        self.vocab_size: int = config.vocab_size or config.tokenizer.vocab_size
        self.ids = {role: special_id(config.tokenizer, role) for role in SPECIAL_ROLES}
        self.pad = self._padding_id()
        self.sample_index = self._build_or_load()
        self.rule = self.masking_rule()
        self.num_epochs = int(np.count_nonzero(self.sample_index[:, 0] == self.sample_index[:, 0].min()))
        logger.log(
            config.source_log_level(index_split),
            "%s %s of %s: %d documents, %d samples in %d epoch(s)",
            type(self).__name__,
            index_split.name,
            dataset_path,
            len(indexed_indices),
            len(self),
            self.num_epochs,
        )

    sequence_name = "sentence"

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> IndexedDataset:
        if config.mock:
            raise UserError(f"no data: give --data-path (or another source of data), made with {SENTENCES}")
        return IndexedDataset(resolve_prefix(dataset_path), multimodal=False, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        return len(self.sample_index)

    @abstractmethod
    def __getitem__(self, idx: int) -> Sample: ...

    def masking_rule(self) -> MaskingRule:
        """Return the masking rule of this data set; cls and sep are never masked."""
        never_masked = np.zeros(self.vocab_size, dtype=bool)
        for role in ("cls", "sep"):
            if self.ids[role] is not None:
                never_masked[self.ids[role]] = True
        return MaskingRule(
            probability=self.config.masking_probability,
            max_ngram=self.config.masking_max_ngram,
            opens_word=self.config.opens_word,
            never_masked=never_masked,
            geometric=self.config.masking_use_geometric_distribution,
            longer_ngrams=self.config.masking_use_longer_ngrams,
        )

    def random_state(self, idx: int) -> np.random.RandomState:
        """The generator of sample ``idx``."""
        return np.random.RandomState((self.config.random_seed + idx) % 2**32)

    def sentences(self, idx: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The tokens of sample ``idx`` int64[n], the lengths of its sentences, and its target length."""
        first, end, target = self.sample_index[idx].tolist()
        tokens = self.dataset.joined(first, end).astype(np.int64)
        self.check_tokens(tokens, self.vocab_size, range(first, end))
        return tokens, self.dataset.sequence_lengths[first:end], target

    def padded(self, values: Any, length: int, filler: int = 0) -> np.ndarray:
        """``values`` as int64[length]; what the tokenizer pads with becomes 0, which every embedding has."""
        array = np.full(length, filler, dtype=np.int64)
        array[: len(values)] = values
        if self.pad > 0:
            array[array == self.pad] = 0
        return array

    @staticmethod
    def ones(count: int, length: int) -> np.ndarray:
        """Return int64[length]: 1 in the first ``count`` positions, 0 in the rest."""
        return (np.arange(length) < count).astype(np.int64)

    def _padding_id(self) -> int:
        """-1 (not in the data) if it is missing or shared with another special token."""
        pad = self.ids["pad"]
        if pad is None or pad < 0:
            return -1
        shared = any(index == pad for role, index in self.ids.items() if role != "pad")
        return pad if not shared or self.config.allow_ambiguous_pad_tokens else -1

    def check_documents(self) -> None:
        bounds, sizes, least = self._bounds(), self.dataset.sequence_lengths, self.config.min_sentences
        for start in range(0, len(bounds) - 1, CHECKED_AT_ONCE):
            some = bounds[start : start + CHECKED_AT_ONCE + 1]
            if gives_samples(some, sizes, least).any():
                return
        raise EmptySplitError(self._empty(no_samples_reason(bounds, sizes, least), bounds))

    def _bounds(self) -> np.ndarray:
        if not len(self.indices):
            raise EmptySplitError(self._empty("it has no documents"))
        assert self.documents_are_a_range
        return self.dataset.document_indices[int(self.indices[0]) : int(self.indices[-1]) + 2]

    def _build_or_load(self) -> np.ndarray:
        """Return [samples, 3] (first sentence, end, target length). Warns if every document is one sequence."""
        config, bounds, sizes = self.config, self._bounds(), self.dataset.sequence_lengths
        single = int(np.diff(bounds).max()) <= 1
        if single and config.min_sentences == 1:
            logger.warning(
                "%s: every document of %s is one sequence, and a sample takes at most its first %d tokens: make "
                "the data with %s to train on all of it",
                self.dataset_path,
                self.index_split.name,
                self.target_length,
                SENTENCES,
            )

        def build() -> dict[str, np.ndarray]:
            epochs = 1 if self.num_samples is None else 2**31 - 2
            options = config.short_sequence_probability, config.random_seed, config.min_sentences
            try:
                rows = build_mapping(bounds, sizes, epochs, self.num_samples, self.target_length, *options)
            except NoSamplesError as error:
                raise EmptySplitError(self._empty(f"{error}", bounds)) from None
            self._check_samples_have_tokens(rows)
            return {"sample_index": rows}

        layout: Layout = {"sample_index": ((None, 3), "uint32" if len(sizes) < 2**32 else "uint64")}
        first, last = int(bounds[0]), int(bounds[-1])
        limits = {"sample_index": [(first, last - 1), (first + 1, last), (2, self.target_length)]}
        identity = {
            "num_samples": self.num_samples,
            "target_length": self.target_length,
            "short_sequence_probability": config.short_sequence_probability,
            "min_sentences": config.min_sentences,
        }
        return self.index_cache(identity, layout, limits).get(build)["sample_index"]

    def _check_samples_have_tokens(self, rows: np.ndarray) -> None:
        """Reject samples [n, 3] of empty sentences; with ``takes_empty_samples`` only if every sample is empty, as
        dropping some would change the order of the others."""
        sizes = self.dataset.sequence_lengths
        if len(sizes) and sizes.min() > 0:
            return
        starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        empty = np.flatnonzero(starts[rows[:, 1].astype(np.int64)] == starts[rows[:, 0].astype(np.int64)])
        if not len(empty):
            return
        document = int(np.searchsorted(self.dataset.document_indices, int(rows[empty, 0].min()), side="right")) - 1
        reason = (
            f"{self.dataset_path}: {counted(len(empty), 'sample')} of {len(rows)} of {self.index_split.name} hold no "
            f"token: the sentences of document {document} (the first of them) are empty; remove empty documents, or "
            f"make the data with {SENTENCES}, which does"
        )
        if not self.takes_empty_samples or len(empty) == len(rows):
            raise UserError(reason)
        logger.warning("%s", reason)

    takes_empty_samples = False
    """Whether a sample without text can be made."""

    def _empty(self, reason: str, bounds: np.ndarray | None = None) -> str:
        what = "a full pass" if self.num_samples is None else counted(self.num_samples, "sample")
        share = f"give that split a larger share in --split (now {self.config.split}) or more data"
        fix, sizes = f"{share}, or ask no samples of it (--eval-iters 0)", self.dataset.sequence_lengths
        if bounds is not None and len(sizes) < len(self.dataset.document_indices):
            fix = f"its documents were not split into sentences: make it with {SENTENCES}"
            if (self.dataset_path or "").endswith("_sentence"):
                fix = "each of its documents is one sentence: take longer ones"
            fix += ", or give --bert-no-binary-head"
        elif bounds is not None and long_documents(bounds, sizes).all():
            fix = f"shorten such sentences, or have them split: {SENTENCES}"
        return f"{what} of {self.index_split.name} asked of {self.dataset_path}, but {reason}; {fix}"
