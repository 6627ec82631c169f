"""The base of data sets that draw samples from one source."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.blend import Split
from megatron.data.index_cache import Bounds, IndexCache, Layout, file_stamp
from megatron.data.index_format import get_bin_path, get_idx_path


class EmptySplitError(UserError):
    """A split that samples are asked of holds no whole sample."""


T = TypeVar("T", bound="MegatronDataset")
Sample = dict[str, Any]
"""Arrays and numbers of a sample by name."""


@dataclass(frozen=True)
class Ragged:
    """Array [n, …] of a sample, where n differs between samples; batches concatenate them."""

    values: np.ndarray


class MegatronDataset(ABC):
    """Samples by number, drawn from the documents ``indices`` of one low-level data set.

    Args:
        dataset: the low-level data set, such as an ``IndexedDataset``.
        dataset_path: its prefix; None for mock data.
        indices: the documents of this split.
        num_samples: samples to provide at least; None for one pass over the documents.
        index_split: which split this is.
        config: the configuration."""

    sequence_name = "document"
    """The unit that the low-level data set stores in sequence."""

    num_epochs = 1
    """Passes over the documents that ``len(self)`` samples take."""

    size_needs_tokenizer: ClassVar[bool] = True
    """Whether :meth:`samples_of_epochs` needs the tokenizer in its configuration."""

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ):
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config

    @classmethod
    def unbuilt(cls: type[T], *source: Any) -> T:
        """Return the data set without indices. Raises EmptySplitError as the constructor."""
        unbuilt = cls.__new__(cls)
        MegatronDataset.__init__(unbuilt, *source)
        unbuilt.check_documents()
        return unbuilt

    @classmethod
    def samples_of_epochs(cls, num_epochs: int, *source: Any) -> int:
        """Return the number of samples of ``num_epochs`` passes over the documents of ``source``, the constructor's
        arguments. Raises EmptySplitError if there are none."""
        return num_epochs * len(cls(*source))

    def check_documents(self) -> None:
        """Raise EmptySplitError if the documents give no sample; uses only what this class's constructor sets."""
        return

    @property
    def documents_are_a_range(self) -> bool:
        """Whether ``indices`` are consecutive."""
        count = len(self.indices)
        first = int(self.indices[0]) if count else 0
        return count > 0 and np.array_equal(self.indices, np.arange(first, first + count))

    def index_cache(self, identity: Mapping[str, object], layout: Layout, bounds: Bounds) -> IndexCache:
        """Return the cache of this data set's arrays: in the configured folder, next to the data, or in memory (mock).

        ``identity``: what the arrays depend on besides the files, documents, split, seed and length. Not the number of
        samples, where only the epochs that it leads to matter."""
        name = type(self).__name__
        if self.config.mock:
            return IndexCache(None, name, identity, layout, bounds)
        prefix = self.dataset.path_prefix
        ranged = self.documents_are_a_range
        identity = {
            "class": name,
            "dataset_path": os.path.abspath(prefix),
            "idx_size_and_mtime": file_stamp(get_idx_path(prefix)),
            "bin_size_and_mtime": file_stamp(get_bin_path(prefix)),
            "index_split": self.index_split.name,
            "documents": [int(self.indices[0]), int(self.indices[-1]) + 1] if ranged else self.indices.tolist(),
            "random_seed": self.config.random_seed,
            "sequence_length": self.config.sequence_length,
            **identity,
        }
        folder = self.config.path_to_cache or os.path.join(prefix, "cache", f"{name}_indices")
        return IndexCache(folder, f"{name}-{self.index_split.name}", identity, layout, bounds)

    def check_tokens(self, tokens: np.ndarray, vocab_size: int, sequences: Any, offset: int = 0) -> None:
        """Raise UserError for ids outside of the vocabulary, from token ``offset`` of ``sequences`` on."""
        # as unsigned, negative ids are the largest: one pass finds both kinds
        if not len(tokens) or int(tokens.view(np.uint64).max()) < vocab_size:
            return
        where = int(np.flatnonzero(tokens.view(np.uint64) >= vocab_size)[0])
        ends = np.cumsum(self.dataset.sequence_lengths[np.asarray(sequences)].astype(np.int64)) - offset
        part = int(np.searchsorted(ends, where, side="right"))
        inside = where - int(ends[part - 1] if part else -offset)
        if self.config.mock:
            raise UserError(
                f"--mock-data: token id {int(tokens[where])} is not below the vocabulary size {vocab_size}; use a"
                " larger --vocab-size, and an end-of-document id (--null-tokenizer-eod-id) below it"
            )
        raise UserError(
            f"{self.dataset_path}: token id {int(tokens[where])} in {self.sequence_name} {int(sequences[part])} at "
            f"token {inside} is not below the vocabulary size {vocab_size}: the data was made with another tokenizer. "
            "Preprocess it with this run's tokenizer, or give this run the tokenizer of the data"
        )

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of elements that ``--split`` divides."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> object:
        """Open the source."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int) -> Sample: ...


def special_id(tokenizer: object, role: str) -> int | None:
    """Return the id of a special token, or None if the tokenizer lacks it."""
    try:
        index = getattr(tokenizer, role)
    except (AttributeError, NotImplementedError, KeyError, ValueError):  # the ways of tokenizers to report a missing id
        return None
    return None if index is None or int(index) < 0 else int(index)
