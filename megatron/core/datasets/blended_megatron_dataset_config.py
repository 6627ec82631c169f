"""The configuration of every data set class. No torch: usable on a node that only prepares data."""

import logging
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

from megatron.core.config.errors import UserError
from megatron.data.blend import (
    DEFAULT_SPLIT,
    Blend,
    Bounds,
    Split,
    check_weights,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

logger = logging.getLogger(__name__)

MANY_SOURCES = 16
"""With more sources the log sums them up; level DEBUG has a line for each."""


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """The data sources, how they are cut and blended, and where indices are cached. Give ``blend`` (all splits from the
    same sources) or ``blend_per_split``, or neither for mock data."""

    reads_text: ClassVar[bool] = False
    """Whether sources are text, not token files: the data set tokenizes them."""

    random_seed: int
    """Seed of the sample order."""

    sequence_length: int
    """Tokens per sample."""

    blend: Blend | None = None
    """Prefixes and their weights, or None for proportions by size."""

    blend_per_split: list[Blend | None] | None = None
    """One blend for each of train, valid and test."""

    multiple_validation_sets: bool | None = None
    """The validation sources stay separate data sets."""

    full_validation: bool | None = None
    """Validation is one full pass; its size is None."""

    split: str | None = None
    """Proportions of train, valid and test documents, such as "969,30,1"; goes with ``blend``."""

    split_matrix: list[Bounds] | None = field(init=False, default=None)
    """``split`` as ranges of [0, 1]."""

    num_dataset_builder_threads: int = 1
    """Sources opened and indexed at the same time."""

    path_to_cache: str | None = None
    """Folder of index files; None: next to the data."""

    mmap_bin_files: bool = True
    """Map token files instead of reading them."""

    mock: bool = field(init=False, default=False)
    """No source is given: synthetic data."""

    tokenizer: Any = None
    """Gives ``eod``, ``vocab_size`` and, if it has one, ``pad``."""

    mid_level_dataset_surplus: float = 0.005
    """Extra share of samples prepared for each source of a blend."""

    allow_ambiguous_pad_tokens: bool | None = False
    """Mask the loss at the tokenizer's padding id even if that is also its end-of-document id."""

    renormalize_blend_weights: bool = True
    """Accepted for existing programs; weights are always normalized."""

    fast_cache_load: bool = False
    """Accepted for existing programs; an index is mapped as soon as its cache exists."""

    defer_npy_index_mmap: bool = False
    """Accepted for existing programs; mapping an index reads nothing."""

    sequences_per_dataset: dict[str, int] | None = None
    """Accepted for existing programs; document counts are read from the index files."""

    s3_cache_path: InitVar[str | None] = None
    """Older name of the following."""

    object_storage_cache_path: str | None = None
    """Cache of data in object storage, which cannot be read: only None is accepted."""

    def __post_init__(self, s3_cache_path: str | None) -> None:
        """Fill in ``split`` and ``split_matrix``; without any blend set ``mock`` and equal splits. Raises UserError for
        object storage, empty blends, or ``blend`` or ``split`` together with ``blend_per_split``."""
        if s3_cache_path or self.object_storage_cache_path:
            raise UserError("--object-storage-cache-path: object storage is not available; copy or mount the data")
        if self.sequence_length < 1:
            raise UserError(f"--seq-length {self.sequence_length}: a sample has at least one token")
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split(self.blend_per_split)
            return
        self.blend_per_split = None
        if self.blend is None:
            self.mock = True
            self.split = "1,1,1"
        else:
            _check_blend(self.blend)
            if self.split is None:
                self.split = DEFAULT_SPLIT
                logger.warning("no --split given: using '%s' (train, valid, test)", DEFAULT_SPLIT)
        assert self.split is not None
        self.split_matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split))

    def source_log_level(self, split: Split) -> int:
        """Level of log lines about one source each: thousands of sources would bury everything else in the log."""
        blend = self.blend if self.blend_per_split is None else self.blend_per_split[split.value]
        return logging.DEBUG if blend is not None and len(blend[0]) > MANY_SOURCES else logging.INFO

    def _check_blend_per_split(self, blends: list[Blend | None]) -> None:
        if self.blend is not None:
            raise UserError("--data-path and the per-split data paths are both given: a run reads one source of data")
        if self.split is not None:
            raise UserError(
                f"--split {self.split} goes with --data-path; the per-split data paths are not cut: drop it"
            )
        if len(blends) != len(Split):
            raise UserError(
                f"blend_per_split has {len(blends)} entries; it needs one for each of train, valid and test"
            )
        for blend in blends:
            if blend is not None:
                _check_blend(blend)


def _check_blend(blend: Blend) -> None:
    prefixes, weights = blend
    if not prefixes:
        raise UserError("a blend without prefixes: --data-path needs at least one")
    if weights is not None:
        check_weights(weights, prefixes)
