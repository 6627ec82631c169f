"""Tokenized documents on disk: a ``.bin`` of tokens and an ``.idx`` that says where each sequence and document starts.

``IndexedDataset`` reads a pair (Megatron-LM's or our own, see ``index_format``), ``IndexedDatasetBuilder`` writes one.
What is left out: object storage."""

import difflib
import glob
import logging
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from megatron.core.safe_files import open_regular
from megatron.data.index_format import DType, Index, IndexedDatasetError, get_bin_path, get_idx_path, read_index
from megatron.data.indexed_writer import IndexedDatasetBuilder
from megatron.data.mapping import map_file

__all__ = [
    "DType",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "IndexedDatasetError",
    "get_bin_path",
    "get_idx_path",
    "resolve_prefix",
]

logger = logging.getLogger(__name__)

# what tools/preprocess_data.py appends for the default json key, without and with --split-sentences
DEFAULT_SUFFIXES = ("_text_document", "_text_sentence")
TEXT_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt", ".parquet", ".gz", ".zst")


class MissingDatasetError(IndexedDatasetError, FileNotFoundError):
    """There is no data set where one was looked for."""


class MemoryMappedTokens:
    """The whole ``.bin`` as one read-only array; slices are views and keep the mapping alive."""

    def __init__(self, bin_path: str, dtype: DTypeLike):
        self.tokens = map_file(bin_path).view(dtype)

    def read(self, start: int, count: int) -> np.ndarray:
        """``count`` tokens from token ``start``."""
        return self.tokens[start : start + count]


class FileTokens:
    """The ``.bin`` read with ``pread``: no file position, so forked workers may share the descriptor."""

    def __init__(self, bin_path: str, dtype: DTypeLike):
        self.bin_path, self.dtype = bin_path, np.dtype(dtype)
        with open_regular(bin_path, buffering=0) as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return ``count`` tokens from token ``start`` as a new array, read from the open file (also if it was replaced
        or unlinked). Raises IndexedDatasetError if it has become shorter, OSError for read errors."""
        tokens = np.empty(count, dtype=self.dtype)
        target = tokens.data.cast("B") if count else memoryview(b"")
        offset, filled = start * self.dtype.itemsize, 0
        while filled < len(target):  # one call reads at most 2 GiB
            got = os.preadv(self.descriptor, [target[filled:]], offset + filled)
            if got == 0:
                raise IndexedDatasetError(
                    f"{self.bin_path} ends before byte {offset + len(target)}: it shrank after opening"
                )
            filled += got
        return tokens


class IndexedDataset:
    """Sequences of tokens by number.

    Args:
        path_prefix: the two files' common path, without ``.bin`` and ``.idx``.
        multimodal: the index also holds a mode per sequence.
        mmap: map the ``.bin`` (arrays are read-only views) instead of reading it (arrays are copies).

    Raises:
        FileNotFoundError: a file is missing.
        IndexedDatasetError: a ValueError; the files are damaged or do not belong together."""

    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True):
        """Raises MissingDatasetError, or IndexedDatasetError for damaged files. Reads no tokens."""
        self.path_prefix, self.multimodal, self.mmap = str(path_prefix), multimodal, mmap
        idx_path, bin_path = get_idx_path(self.path_prefix), get_bin_path(self.path_prefix)
        for path in (idx_path, bin_path):
            if not os.path.exists(path):
                raise MissingDatasetError(
                    f"{path} does not exist. A data set is a pair of files {self.path_prefix}.bin and .idx"
                )
        # before they are opened: what changes afterwards is noticed
        self._stamps = {path: os.stat(path) for path in (idx_path, bin_path)}
        self.index: Index = read_index(idx_path, os.path.getsize(bin_path), multimodal)
        reader = MemoryMappedTokens if mmap else FileTokens
        self._tokens = reader(bin_path, self.index.dtype)
        # keeps the hot path off the properties of Index
        self._lengths, self._pointers, self._size = (
            self.index.sequence_lengths,
            self.index.sequence_pointers,
            self.index.dtype_size,
        )

    def __getstate__(self) -> tuple[str, bool, bool]:
        return self.path_prefix, self.multimodal, self.mmap

    def __setstate__(self, state: tuple[str, bool, bool]) -> None:
        IndexedDataset.__init__(self, *state)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, idx: int | np.integer | slice) -> Any:
        """Return sequence ``idx`` (negative: from the end), or the list of sequences of a slice with step 1, cut to the
        data set; with modes as second result if multimodal. Mapped data gives read-only views, else new arrays. Raises
        IndexError outside the data set, TypeError for other indices, ValueError for another step."""
        if isinstance(idx, int | np.integer):
            return self.get(int(idx))
        if not isinstance(idx, slice):
            raise TypeError(f"an IndexedDataset is indexed by a number or a slice, not by {type(idx).__name__}")
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of an IndexedDataset must have step 1, not {step}")
        sequences: list[np.ndarray] = []
        if start < stop:
            sequences = np.split(self.joined(start, stop), np.cumsum(self._lengths[start:stop], dtype=np.int64)[:-1])
        return (sequences, self.sequence_modes[start:stop]) if self.multimodal else sequences

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """Return ``length`` tokens (None: to its end) of sequence ``idx`` from token ``offset``, mapped data as a
        read-only view, else as a new array; with the mode if multimodal. Raises IndexError for tokens outside the
        sequence or sequences outside the data set; negative ``idx`` counts from the end."""
        if not -len(self._lengths) <= idx < len(self._lengths):
            raise IndexError(f"sequence {idx} of {self.path_prefix}, which has {len(self)}")
        available = int(self._lengths[idx]) - offset
        length = available if length is None else int(length)
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(
                f"{length} tokens from offset {offset} of sequence {idx} of {self.path_prefix}, "
                f"which has {int(self._lengths[idx])} tokens"
            )
        tokens = self._tokens.read(int(self._pointers[idx]) // self._size + int(offset), length)
        return (tokens, self.sequence_modes[idx]) if self.multimodal else tokens

    def joined(self, start: int, stop: int) -> np.ndarray:
        """Return the concatenated tokens of sequences ``start`` to ``stop`` (at least one); a view if memory-mapped."""
        count = int(self._lengths[start:stop].sum(dtype=np.int64))
        return self._tokens.read(int(self._pointers[start]) // self._size, count)

    def gather(self, sequences: np.ndarray, offset: int, out: np.ndarray) -> int:
        """Fill ``out`` in place with the concatenated tokens of ``sequences``, from token ``offset`` of the first one,
        cast to its dtype. Returns the number of tokens written, which is less than ``len(out)`` if the sequences end
        early; the others stay unchanged. ``offset`` must lie inside the first sequence."""
        filled, size, capacity = 0, self._size, len(out)
        for start, length in zip(self._pointers[sequences].tolist(), self._lengths[sequences].tolist()):
            count = min(length - offset, capacity - filled)
            out[filled : filled + count] = self._tokens.read(start // size + offset, count)
            filled, offset = filled + count, 0
        return filled

    def changes(self) -> Iterator[str]:
        """Yield a text for each file that was written to, replaced or removed since it was opened; nothing if none was.
        Raises IndexedDatasetError: one is shorter than it was: its end reads as zeros, or kills the process."""
        for path, before in self._stamps.items():
            try:
                now = os.stat(path)
            except OSError as error:
                yield f"{path} cannot be found any more ({error.strerror}): this run continues with the opened file"
                continue
            # another file of that name (renamed into its place) leaves the one that is mapped as it is
            is_same = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
            if is_same and now.st_size < before.st_size:
                raise IndexedDatasetError(
                    f"{path} was cut while this run read it: it had {before.st_size} bytes and has {now.st_size}, and"
                    " what is missing may have been read as zeros. Copy it again and continue from the last checkpoint"
                )
            if not is_same or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                yield (
                    f"{path} was {'written to' if is_same else 'replaced'} while this run reads it: samples may not be"
                    " those of the file that it began with, and a resumed run will read the new one"
                )

    @property
    def sequence_lengths(self) -> np.ndarray:
        """int32[S], tokens per sequence."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        """int64[D], the sequence number at which each document starts, and S at the end."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> np.ndarray:
        """int8[S], multimodal data sets only."""
        if self.index.sequence_modes is None:
            raise ValueError(f"{self.path_prefix} is not multimodal: it holds no sequence modes")
        return self.index.sequence_modes

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files are there."""
        return os.path.exists(get_idx_path(path_prefix)) and os.path.exists(get_bin_path(path_prefix))


HALVES = ((".bin", ".idx"), (".idx", ".bin"))


def _not_a_prefix(path: str) -> str:
    """Return why a folder, a text file, or one file of a data set is not a prefix, with the fix; else ""."""
    stem, suffix = os.path.splitext(path)
    if suffix in (".bin", ".idx") and IndexedDataset.exists(stem):
        return f"leave out {suffix}: {stem}"
    stem = stem if suffix in (".bin", ".idx") else path
    if halves := [
        (has, lacks) for has, lacks in HALVES if os.path.isfile(stem + has) and not os.path.exists(stem + lacks)
    ]:
        (has, lacks) = halves[0]
        return f"{stem}{has} exists, {stem}{lacks} is missing; copy both files, or preprocess the text again"
    stem, suffix = os.path.splitext(path)
    if os.path.isdir(path):
        inside = sorted(name.removesuffix(".idx") for name in glob.glob(glob.escape(path) + "/*.idx"))
        return "is a folder; give the path of a data set without .bin and .idx" + (
            f", such as {' or '.join(inside[:3])}" if inside else ""
        )
    if not os.path.isfile(path) or suffix in (".bin", ".idx"):
        return ""
    while suffix in TEXT_SUFFIXES:
        stem, suffix = os.path.splitext(stem)
    stem += suffix
    return (
        "is text, not token ids; preprocess it, with the tokenizer flags of this run: tools/preprocess_data.py --input"
        f" {path} --output-prefix {stem} --append-eod ...; then use {stem}{DEFAULT_SUFFIXES[0]}"
    )


def resolve_prefix(path_prefix: str) -> str:
    """Return the prefix to open for a data path: the path itself, or with the first of ``DEFAULT_SUFFIXES`` for which
    both files exist (logged). Raises MissingDatasetError, with similar paths or the fix for a folder or text."""
    if IndexedDataset.exists(path_prefix):
        return path_prefix
    for suffix in DEFAULT_SUFFIXES:
        if IndexedDataset.exists(path_prefix + suffix):
            logger.info("no files %s.bin/.idx; using %s", path_prefix, path_prefix + suffix)
            return path_prefix + suffix
    if reason := _not_a_prefix(path_prefix):
        raise MissingDatasetError(f"no data set at {path_prefix}: {reason}")
    indices = glob.glob(glob.escape(os.path.dirname(path_prefix) or ".") + "/*.idx")
    near = difflib.get_close_matches(
        path_prefix, [name.removesuffix(".idx").removeprefix("./") for name in indices], n=3, cutoff=0.7
    )
    hint = f" Near by: {', '.join(near)}." if near else ""
    raise MissingDatasetError(
        f"no data set at {path_prefix}: neither {path_prefix}.bin/.idx nor with {' or '.join(DEFAULT_SUFFIXES)} "
        f"behind the name exist as a pair.{hint} "
        "A data path is what tools/preprocess_data.py printed, without .bin or .idx."
    )
