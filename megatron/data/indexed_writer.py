"""Writing a ``.bin``/``.idx`` pair in one pass and bounded memory.

Tokens stream into the ``.bin``; lengths, document boundaries and modes are spooled to temporary files and become the
``.idx`` at the end. All of it goes to temporary names in the target folder. ``finalize`` syncs them and renames the
``.bin``, then the ``.idx``: after an earlier failure (a full disk, a kill, a power loss) no file looks complete."""

import array
import contextlib
import os
import shutil
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron.core.config.errors import UserError
from megatron.core.safe_files import create_file, fsync_path, open_regular
from megatron.data.index_format import HEADER, MAGIC, VERSION, DType, get_bin_path, get_idx_path, read_index

BUFFER_BYTES = 4 << 20
SPOOL_ITEMS = 1 << 18


class Spool:
    """A growing column of integers: the latest in memory, the rest in a temporary file."""

    def __init__(self, path: str, typecode: str):
        self.path, self.buffer, self.count = path, array.array(typecode), 0
        self.file: BinaryIO = create_file(path, "x+b", buffering=0)  # closed by the builder

    def append(self, value: int) -> None:
        self.buffer.append(value)
        self.count += 1
        if len(self.buffer) >= SPOOL_ITEMS:
            self.flush()

    def extend(self, values: np.ndarray) -> None:
        self.flush()
        values = np.asarray(values, dtype=np.dtype(self.buffer.typecode))
        for start in range(0, len(values), SPOOL_ITEMS):
            self.write(values[start : start + SPOOL_ITEMS].tobytes())
        self.count += len(values)

    def flush(self) -> None:
        if self.buffer:
            self.write(self.buffer.tobytes())
            del self.buffer[:]

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.file.write(view) :]

    def chunks(self) -> Iterator[np.ndarray]:
        """All values from the first, a piece at a time."""
        self.flush()
        self.file.seek(0)
        dtype = np.dtype(self.buffer.typecode)
        while data := self.file.read(SPOOL_ITEMS * dtype.itemsize):
            yield np.frombuffer(data, dtype=dtype)


class IndexedDatasetBuilder:
    """Write documents, then ``finalize``; as a context manager, an exception inside removes what was written.

    Args:
        bin_path: the ``.bin`` to write.
        dtype: token type, ``DType.optimal_dtype(vocab_size)`` for text.
        multimodal: store a mode per sequence.

    Raises:
        OSError: from any method, when the disk is full or a file cannot be written; the partial files are then removed.
        ValueError: a token does not fit ``dtype``, or lengths do not sum to the number of tokens."""

    def __init__(self, bin_path: str, dtype: DTypeLike = np.int32, multimodal: bool = False):
        """Temporary files are next to ``bin_path``; an older data set stays until ``finalize``."""
        self.bin_path, self.dtype, self.multimodal = str(bin_path), np.dtype(dtype).type, multimodal
        self._np_dtype = np.dtype(dtype)
        DType.code_from_dtype(dtype)
        partial = f"{self.bin_path}.partial-{os.getpid()}"  # no .bin or .idx at the end: no program reads it as data
        self._paths = {name: f"{partial}-{name}" for name in ("tokens", "index", "lengths", "documents", "modes")}
        self._cleanup = weakref.finalize(self, _remove, list(self._paths.values()), os.getpid())
        self._open = True
        with self._reporting():
            self.data_file: BinaryIO = create_file(self._paths["tokens"], buffering=BUFFER_BYTES)
            self._lengths = Spool(self._paths["lengths"], "i")
            self._documents = Spool(self._paths["documents"], "q")
            self._modes = Spool(self._paths["modes"], "b") if multimodal else None
            self._documents.append(0)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._open:
            self.abort()

    def add_item(self, tensor: ArrayLike, mode: int = 0) -> None:
        """Append one sequence to the open document; ``end_document`` closes it. ``mode`` is ignored unless multimodal.
        Raises UserError for ids that do not fit the dtype; OSError, after removing all files, if writing fails."""
        tokens = self._as_tokens(tensor)
        with self._reporting():
            self.data_file.write(tokens.data)
            self._lengths.append(tokens.size)
            if self._modes is not None:
                self._modes.append(mode)

    def end_document(self) -> None:
        """Close the document that ``add_item`` filled."""
        with self._reporting():
            self._documents.append(self._lengths.count)

    def add_document(
        self, tensor: ArrayLike, lengths: Sequence[int] | np.ndarray, modes: Sequence[int] | np.ndarray | None = None
    ) -> None:
        """Append a complete document: its tokens, the lengths of its sequences, and their modes if multimodal (default
        0). Raises ValueError if the lengths do not sum to the number of tokens, UserError for ids that do not fit the
        dtype; single lengths are not checked."""
        tokens = self._as_tokens(tensor)
        if sum(lengths) != tokens.size:
            raise ValueError(f"the lengths of a document sum to {sum(lengths)}, but it has {tokens.size} tokens")
        with self._reporting():
            self.data_file.write(tokens.data)
            for length in lengths:
                self._lengths.append(length)
            self._documents.append(self._lengths.count)
            if self._modes is not None:
                for mode in modes if modes is not None else [0] * len(lengths):
                    self._modes.append(mode)

    def add_documents(self, tensor: ArrayLike, lengths: ArrayLike) -> None:
        """Append many documents of one sequence each: all tokens, and each length; modes are 0. Raises ValueError for
        negative lengths, or if they do not sum to the number of tokens; UserError for ids that do not fit the dtype."""
        tokens, sizes = self._as_tokens(tensor), np.asarray(lengths, dtype=np.int32)
        if int(sizes.sum(dtype=np.int64)) != tokens.size or (len(sizes) and int(sizes.min()) < 0):
            raise ValueError(f"the lengths sum to {int(sizes.sum(dtype=np.int64))}, but there are {tokens.size} tokens")
        with self._reporting():
            self.data_file.write(tokens.data)
            first = self._lengths.count
            self._lengths.extend(sizes)
            self._documents.extend(np.arange(first + 1, first + len(sizes) + 1, dtype=np.int64))
            if self._modes is not None:
                self._modes.extend(np.zeros(len(sizes), dtype=np.int8))

    def add_index(self, path_prefix: str) -> None:
        """Append all documents of the finished data set at ``path_prefix``, unread. Raises UserError if it has another
        dtype, IndexedDatasetError if its index is damaged."""
        bin_path = get_bin_path(path_prefix)
        index = read_index(get_idx_path(path_prefix), os.path.getsize(bin_path), self.multimodal)
        if index.dtype != self.dtype:
            raise UserError(
                f"{path_prefix} holds {index.dtype.__name__} tokens, this data set {self.dtype.__name__}: "
                "tokenize both with the same vocabulary"
            )
        with self._reporting():
            first = self._lengths.count
            self._lengths.extend(index.sequence_lengths)
            for start in range(1, index.document_count, SPOOL_ITEMS):
                self._documents.extend(index.document_indices[start : start + SPOOL_ITEMS] + first)
            if self._modes is not None and index.sequence_modes is not None:
                self._modes.extend(index.sequence_modes)
            with open_regular(bin_path) as source:
                shutil.copyfileobj(source, self.data_file, BUFFER_BYTES)

    def finalize(self, idx_path: str) -> None:
        """Write the index, sync both files, and rename the .bin, then the .idx, replacing older ones; syncs the folder
        after each. Every document must have been ended. Raises ValueError after ``finalize`` or ``abort``; OSError,
        after removing the temporary files."""
        if not self._open:
            raise ValueError(f"{self.bin_path} is already finished or was given up")
        with self._reporting():
            self.data_file.flush()
            os.fsync(self.data_file.fileno())
            self.data_file.close()
            with create_file(self._paths["index"], buffering=BUFFER_BYTES) as stream:
                self._write_index(stream)
                stream.flush()
                os.fsync(stream.fileno())
            remove_index(idx_path)  # an older index must never exist together with the new tokens
            for temporary, final in ((self._paths["tokens"], self.bin_path), (self._paths["index"], idx_path)):
                os.replace(temporary, final)
                # a power loss keeps unsynced renames in any order: the index must not outlive its tokens
                fsync_path(os.path.dirname(os.path.abspath(final)))
        self.abort()

    def abort(self) -> None:
        """Remove the temporary files without publishing anything; no effect after ``finalize``."""
        self._open = False
        for file in (self.data_file, self._lengths.file, self._documents.file, self._modes and self._modes.file):
            if file:
                with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
                    file.close()
        self._cleanup()

    def _write_index(self, stream: BinaryIO) -> None:
        """Little-endian: header, lengths, byte offsets, document boundaries, modes. Reads spooled numbers in chunks."""
        stream.write(
            HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(self.dtype), self._lengths.count, self._documents.count)
        )
        for lengths in self._lengths.chunks():
            stream.write(lengths.astype("<i4").tobytes())
        position = 0
        for lengths in self._lengths.chunks():
            ends = position + np.cumsum(lengths.astype("<i8") * self._np_dtype.itemsize)
            stream.write(struct.pack("<q", position) + ends[:-1].astype("<i8").tobytes())
            position = int(ends[-1])
        for documents in self._documents.chunks():
            stream.write(documents.astype("<i8").tobytes())
        if self._modes is not None:
            for modes in self._modes.chunks():
                stream.write(modes.tobytes())

    def _as_tokens(self, values: ArrayLike) -> np.ndarray:
        """No copy if possible. Raises UserError if an integer does not fit; floats are cast unchecked."""
        array = np.asarray(values)
        if array.dtype == self._np_dtype:
            return np.ascontiguousarray(array)
        if array.dtype.kind in "iu" and self._np_dtype.kind in "iu" and array.size:
            limits = np.iinfo(self._np_dtype)
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                worst = low if low < limits.min else high
                raise UserError(
                    f"token id {worst} does not fit {self._np_dtype.name} ({limits.min} to {limits.max}) in "
                    f"{self.bin_path}: choose the dtype with DType.optimal_dtype(vocab_size)"
                )
        return np.ascontiguousarray(array, dtype=self._np_dtype)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """An OSError removes the partial files and is raised again with the name of the data set."""
        try:
            yield
        except OSError as error:
            if hasattr(self, "_documents"):
                self.abort()
            self._cleanup()
            raise OSError(
                error.errno, f"cannot write {self.bin_path}: {error.strerror}. What was written of it is removed"
            ) from error


def remove_index(idx_path: str) -> None:
    """Remove an .idx file if it exists, durably: without it the .bin file is no data set."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(idx_path)
        fsync_path(os.path.dirname(os.path.abspath(idx_path)))


def _remove(paths: list[str], pid: int) -> None:
    if os.getpid() != pid:  # a forked worker must not remove its parent's files
        return
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
