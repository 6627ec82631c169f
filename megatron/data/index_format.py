"""The ``.idx`` file: its layout, the token dtypes, and a reader that believes nothing it has not checked.

Little-endian, Megatron-LM's bytes::

    0   9 bytes    b"MMIDIDX\\0\\0"
    9   uint64     version, 1
    17  uint8      dtype code of the tokens (DType)
    18  uint64     S, sequences
    26  uint64     D, document boundaries (documents + 1: a leading 0 is stored)
    34  int32[S]   tokens per sequence
        int64[S]   byte offset of each sequence in the .bin
        int64[D]   sequence number at which each document starts; the last equals S
        int8[S]    mode per sequence, multimodal data sets only

The ``.bin`` is the bare concatenation of the tokens."""

import enum
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from megatron.core.config.errors import UserError
from megatron.data.mapping import map_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = HEADER.size  # 34
CHECK_CHUNK = 1 << 18  # sequences per step of the consistency check: stays in the L2 cache, bounds memory


class IndexedDatasetError(UserError):
    """A ``.bin``/``.idx`` pair that must not be read; the message names the file, the reason and the fix."""


class DType(enum.Enum):
    """Token types and their codes in the ``.idx``."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: DTypeLike) -> int:
        """The code of a numpy type or dtype."""
        return cls[np.dtype(value).name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.generic]:
        """The numpy type of a code."""
        return np.dtype(cls(value).name).type

    @staticmethod
    def size(key: DTypeLike | int) -> int:
        """Bytes of a code, numpy type or dtype."""
        return np.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.generic]:
        """uint16 for a vocabulary below 65500 ids, else int32."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


def get_idx_path(path_prefix: str) -> str:
    """The index file of a prefix."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """The token file of a prefix."""
    return path_prefix + ".bin"


@dataclass(frozen=True)
class Index:
    """An opened ``.idx``. The arrays are read-only views of the mapped file, which they keep alive."""

    dtype: type[np.generic]
    sequence_lengths: np.ndarray
    """int32[S], tokens."""
    sequence_pointers: np.ndarray
    """int64[S], byte offsets into the .bin."""
    document_indices: np.ndarray
    """int64[D], sequence numbers."""
    sequence_modes: np.ndarray | None
    """int8[S], multimodal only."""

    @property
    def dtype_size(self) -> int:
        """Bytes per token."""
        return DType.size(self.dtype)

    @property
    def sequence_count(self) -> int:
        """S."""
        return len(self.sequence_lengths)

    @property
    def document_count(self) -> int:
        """D, as stored: one more than there are documents."""
        return len(self.document_indices)

    def __len__(self) -> int:
        return self.sequence_count


def read_index(idx_path: str, bin_bytes: int, multimodal: bool = False) -> Index:
    """Open an ``.idx`` and prove it consistent with itself and with a ``.bin`` of ``bin_bytes`` bytes.

    Costs one sequential pass over the index, nothing over the tokens. Raises IndexedDatasetError: with the exact
    reason."""
    buffer = map_file(idx_path)
    dtype, num_sequences, num_documents = _read_header(idx_path, buffer)
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_documents + (num_sequences if multimodal else 0)
    if len(buffer) != expected:
        _refuse_size(idx_path, len(buffer), expected, num_sequences, multimodal)
    ends = np.cumsum([HEADER_BYTES, 4 * num_sequences, 8 * num_sequences, 8 * num_documents])
    index = Index(
        dtype=dtype,
        sequence_lengths=buffer[ends[0] : ends[1]].view("<i4"),
        sequence_pointers=buffer[ends[1] : ends[2]].view("<i8"),
        document_indices=buffer[ends[2] : ends[3]].view("<i8"),
        sequence_modes=buffer[ends[3] :].view(np.int8) if multimodal else None,
    )
    _check_tokens(idx_path, index, bin_bytes)
    _check_documents(idx_path, index)
    return index


def _read_header(idx_path: str, buffer: np.ndarray) -> tuple[type[np.generic], int, int]:
    """Return (token dtype, number of sequences, number of stored document boundaries)."""
    if len(buffer) < HEADER_BYTES:
        what = "is empty" if len(buffer) == 0 else f"ends within its header ({len(buffer)} of {HEADER_BYTES} bytes)"
        raise _error(idx_path, what)
    magic, version, code, num_sequences, num_documents = HEADER.unpack(buffer[:HEADER_BYTES].tobytes())
    if magic != MAGIC:
        raise _error(idx_path, f"is no index file: it begins with {magic!r} instead of {MAGIC!r}")
    if version == int.from_bytes(VERSION.to_bytes(8, "little"), "big"):
        raise _error(idx_path, "is byte-swapped: it was written big-endian")
    if version != VERSION:
        raise _error(idx_path, f"has version {version}; this program reads version {VERSION}")
    if code not in [member.value for member in DType]:
        raise _error(idx_path, f"has the unknown token dtype code {code}")
    if num_documents == 0:
        raise _error(idx_path, "has no document boundaries; even an empty data set stores one")
    return DType.dtype_from_code(code), num_sequences, num_documents


def _refuse_size(idx_path: str, actual: int, expected: int, num_sequences: int, multimodal: bool) -> None:
    """Multimodal files opened without ``multimodal`` and the reverse are named. Never returns."""
    if not multimodal and actual == expected + num_sequences:
        raise _error(idx_path, "holds sequence modes: it is multimodal, open it with multimodal=True")
    if multimodal and actual == expected - num_sequences:
        raise _error(idx_path, "holds no sequence modes: it is not multimodal")
    state = "is truncated" if actual < expected else "has grown"
    raise _error(
        idx_path, f"{state}: its header announces {expected} bytes ({num_sequences} sequences), it has {actual}"
    )


def _check_tokens(idx_path: str, index: Index, bin_bytes: int) -> None:
    """Raise the index error unless byte offsets are the running sum of lengths and end at ``bin_bytes``."""
    bin_path = idx_path.removesuffix(".idx") + ".bin"
    lengths, pointers, size = index.sequence_lengths, index.sequence_pointers, index.dtype_size
    count = len(lengths)
    announced = int(pointers[-1]) + int(lengths[-1]) * size if count else 0
    if bin_bytes % size:
        raise _error(bin_path, f"has {bin_bytes} bytes, which is no whole number of {index.dtype.__name__} tokens")
    if bin_bytes != announced:
        state = "is empty" if bin_bytes == 0 else "is truncated" if bin_bytes < announced else "has grown"
        raise _error(bin_path, f"{state}: its index announces {announced} bytes, it has {bin_bytes}")
    if count and int(pointers[0]) != 0:
        raise _error(idx_path, f"starts its first sequence at byte {int(pointers[0])} instead of 0")
    for start in range(0, count, CHECK_CHUNK):
        stop = min(start + CHECK_CHUNK, count)
        chunk = lengths[start:stop]
        if int(chunk.min()) < 0:
            where = start + int(chunk.argmin())
            raise _error(idx_path, f"has the negative length {int(lengths[where])} at sequence {where}")
        ends = pointers[start + 1 : stop + 1]
        wrong = np.subtract(ends, pointers[start : start + len(ends)])
        wrong -= chunk[: len(ends)].astype(np.int64) * size
        if wrong.any():
            where = start + int(np.flatnonzero(wrong)[0])
            position, next_position = int(pointers[where]), int(pointers[where + 1])
            reason = "pointers are not monotone" if next_position < position else "pointers disagree with the lengths"
            raise _error(
                idx_path,
                f"{reason}: sequence {where} has {int(lengths[where])} tokens of {size} bytes at byte {position}, "
                f"and the next begins at {next_position}",
            )


def _check_documents(idx_path: str, index: Index) -> None:
    """Raise the index error unless boundaries start at 0, never decrease, and end at the number of sequences."""
    documents = index.document_indices
    if int(documents[0]) != 0:
        raise _error(idx_path, f"starts its first document at sequence {int(documents[0])} instead of 0")
    if int(documents[-1]) != index.sequence_count:
        raise _error(
            idx_path,
            f"ends its last document at sequence {int(documents[-1])}, but has {index.sequence_count} sequences",
        )
    for start in range(0, len(documents) - 1, CHECK_CHUNK):
        chunk = documents[start : start + CHECK_CHUNK + 1]
        falls = chunk[1:] < chunk[:-1]
        if falls.any():
            raise _error(idx_path, f"has document boundaries that fall after document {start + int(np.argmax(falls))}")


def _error(path: str, reason: str) -> IndexedDatasetError:
    return IndexedDatasetError(f"{path} {reason}. Copy the .bin and .idx again, or rerun tools/preprocess_data.py.")
