"""The import path that programs know; see ``megatron.data.indexed_dataset``."""

from megatron.data.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedDatasetError,
    get_bin_path,
    get_idx_path,
    resolve_prefix,
)

__all__ = [
    "DType",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "IndexedDatasetError",
    "get_bin_path",
    "get_idx_path",
    "resolve_prefix",
]
