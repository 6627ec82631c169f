"""The index builders by the names and signatures that programs call: ``megatron.core.datasets.helpers`` and
``helpers_cpp``."""

from __future__ import annotations

import numpy as np

from megatron.data import helpers, sentence_map
from megatron.data.helpers import build_sample_idx

__all__ = [
    "build_blending_indices",
    "build_blocks_mapping",
    "build_exhaustive_blending_indices",
    "build_mapping",
    "build_sample_idx",
    "build_sample_idx_int32",
    "build_sample_idx_int64",
]

build_sample_idx_int32 = build_sample_idx_int64 = build_sample_idx
"""The type of the result follows ``document_indices`` in either case."""


def build_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: np.ndarray,
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill ``dataset_index`` int16[size] and ``dataset_sample_index`` int64[size]; see ``megatron.data.helpers``."""
    dataset_index[:], dataset_sample_index[:] = helpers.build_blending_indices(weights[:num_datasets], size)


def build_exhaustive_blending_indices(
    dataset_index: np.ndarray, dataset_sample_index: np.ndarray, sizes: np.ndarray, num_datasets: int
) -> None:
    """Fill both arrays, which are as long as the sum of ``sizes``; see ``megatron.data.helpers``."""
    dataset_index[:], dataset_sample_index[:] = helpers.build_exhaustive_blending_indices(sizes[:num_datasets])


def build_mapping(
    docs: np.ndarray,
    sizes: np.ndarray,
    num_epochs: int,
    max_num_samples: int | None,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    verbose: bool = False,
    min_num_sent: int = 2,
) -> np.ndarray:
    """``megatron.data.sentence_map.build_mapping``."""
    options = max_seq_length, short_seq_prob, seed, min_num_sent
    return sentence_map.build_mapping(docs, sizes, num_epochs, max_num_samples, *options)


def build_blocks_mapping(
    docs: np.ndarray,
    sizes: np.ndarray,
    titles_sizes: np.ndarray,
    num_epochs: int,
    max_num_samples: int | None,
    max_seq_length: int,
    seed: int,
    verbose: bool = False,
    use_one_sent_blocks: bool = False,
) -> np.ndarray:
    """``megatron.data.sentence_map.build_blocks_mapping``."""
    options = max_seq_length, seed, use_one_sent_blocks
    return sentence_map.build_blocks_mapping(docs, sizes, titles_sizes, num_epochs, max_num_samples, *options)
