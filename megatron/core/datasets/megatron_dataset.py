"""The base of data sets that draw samples from one source."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.blend import Split


class EmptySplitError(UserError):
    """A split that samples are asked of holds no whole sample."""


class MegatronDataset(ABC):
    """Samples by number, drawn from the documents ``indices`` of one low-level data set.

    Args:
        dataset: the low-level data set, such as an ``IndexedDataset``.
        dataset_path: its prefix; None for mock data.
        indices: the documents of this split.
        num_samples: samples to provide at least; None for one pass over the documents.
        index_split: which split this is.
        config: the configuration.
    """

    num_epochs = 1
    """Passes over the documents that ``len(self)`` samples take."""

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
        self.unique_identifiers = {
            "class": type(self).__name__,
            "dataset_path": dataset_path,
            "num_samples": num_samples,
            "index_split": index_split.name,
            "random_seed": config.random_seed,
            "sequence_length": config.sequence_length,
            "split": config.split,
        }

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of elements that ``--split`` divides."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        """Open the source."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, Any]: ...
