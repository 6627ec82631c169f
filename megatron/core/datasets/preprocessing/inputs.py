"""The input files, and how they are cut into parts that are processed, kept and repeated independently.

A plain JSON-lines file is cut by bytes: a part owns the lines that *begin* in its range. Compressed files can only be
read from their start: the parent decompresses and cuts at line ends. A parquet file is cut by row groups. The cuts
depend only on the input, never on the number of workers."""

from __future__ import annotations

import glob
import logging
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError, listed
from megatron.core.safe_files import open_regular, parse_json
from megatron.core.tokenizers.libraries import require

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

logger = logging.getLogger(__name__)

TEXT_SUFFIX = ".txt"
SUFFIXES = (".jsonl", ".json", ".ndjson", ".gz", ".zst", ".parquet")
READ_BYTES = 1 << 20
TEXT = ("file", "paragraph", "line")
"""Kinds of plain text files, which are the values of --text-documents."""
MIN_PART_BYTES, MAX_PART_BYTES, PARTS = 2 << 20, 32 << 20, 512


@dataclass(frozen=True)
class InputFile:
    """One input file as it was when the run started."""

    path: str
    kind: str  # "plain", "gzip" and "zstd" (JSON lines), "parquet", or one of TEXT
    size: int
    modified_ns: int

    @property
    def unit(self) -> str:
        """Name of one entry: "line", "row" (parquet) or "document" (plain text)."""
        return "document" if self.kind in TEXT else "row" if self.kind == "parquet" else "line"

    def check_unchanged(self) -> None:
        """Raise ``ValueError`` if the file is not the one that was planned."""
        status = os.stat(self.path)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.modified_ns):
            raise UserError(f"{self.path} changed while it was read; run again when it is complete")


@dataclass(frozen=True)
class InputSlice:
    """One unit of work."""

    file_index: int
    number: int  # within the file
    file: InputFile
    start: int = 0  # plain: bytes [start, stop); parquet: row groups [start, stop)
    stop: int = 0
    data: bytes | None = None  # compressed: the lines themselves
    weight: int = 0  # bytes of the file that this part stands for, for progress

    @property
    def name(self) -> str:
        """Sorts in the order of the output."""
        return f"{self.file_index:06d}-{self.number:08d}"


def find_inputs(patterns: list[str], keys: Sequence[str] = ("text",), text: str = "file") -> list[InputFile]:
    """Return the files that --input names, in the given order: paths, globs (matches sorted), or folders
    (:func:`_below`). A file that is named twice is read once, with a warning.

    Args:
        keys: the --json-keys; plain text has one.
        text: one document of plain text (--text-documents): "file", "paragraph" or "line".

    Raises:
        UserError: nothing matches, a match is no regular file, a name contradicts the content, or plain text has
            several keys."""
    files: dict[str, InputFile] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UserError(f"--input {pattern}: no such file, folder or glob match")
        for match in matches:
            for path in _below(match):
                status = os.stat(path)
                if not stat.S_ISREG(status.st_mode):
                    raise UserError(
                        f"--input {path} is not a regular file; a pipe cannot be read again after an interruption: "
                        "write it to a file first"
                    )
                if path in files:
                    logger.warning("--input names %s twice; it is read once", path)
                kind = _kind(path)
                if kind == "plain" and _is_text(path):
                    kind = text
                    if len(keys) > 1:
                        names = " ".join(keys)
                        raise UserError(f"--json-keys {names}: {path} is plain text, which has one text per document")
                files.setdefault(path, InputFile(path, kind, status.st_size, status.st_mtime_ns))
    return list(files.values())


def describe_inputs(files: Sequence[InputFile]) -> str:
    """Return the numbers of files by format for the log, with the document of plain text."""
    counts = Counter("JSON lines" if file.kind in ("plain", "gzip", "zstd") else file.kind for file in files)
    return ", ".join(
        f"{count} file(s) of plain text (--text-documents {kind}: one document per {kind})"
        if kind in TEXT
        else f"{count} file(s) of {kind}"
        for kind, count in counts.items()
    )


def _below(path: str) -> list[str]:
    """Known suffixes first, .txt files if there are none; hidden files are ignored. Warns about skipped files."""
    if not os.path.isdir(path):
        return [path]
    files = sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names if not name.startswith(".")
    )
    suffixes: tuple[str, ...] = SUFFIXES
    if not any(file.endswith(SUFFIXES) for file in files):  # else .txt files are notes and licenses
        suffixes = (TEXT_SUFFIX,)
    matches = [file for file in files if file.endswith(suffixes)]
    if not matches:
        raise UserError(f"--input {path}: the folder holds no {', '.join((*SUFFIXES, TEXT_SUFFIX))} file")
    if skipped := [os.path.relpath(file, path) for file in files if not file.endswith(suffixes)]:
        logger.warning(
            "--input %s: skips %d file(s) that are not %s: %s",
            path,
            len(skipped),
            ", ".join(suffixes),
            listed(skipped, most=5),
        )
    return matches


def _kind(path: str) -> str:
    """Kind by suffix. Raises UserError if the first bytes of the file show another kind; empty files pass."""
    kinds = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}
    kind = kinds.get(os.path.splitext(path)[1], "plain")
    with open_regular(path) as file:
        magic = file.read(4)
    looks = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}.get(magic[:2], "parquet" if magic == b"PAR1" else "plain")
    if magic and looks != kind:
        raise UserError(f"--input {path} is named like {kind} but its content is {looks}; rename or repair it")
    return kind


def _is_text(path: str) -> bool:
    """Whether a ``.txt`` file is plain text: its first line is not a JSON object."""
    if not path.endswith(TEXT_SUFFIX):
        return False
    with open_regular(path) as file:
        start = file.read(READ_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    line, line_end, _ = start.partition(b"\n")
    if not line.startswith(b"{"):
        return True
    try:
        return not isinstance(parse_json(line), dict)
    except ValueError:
        return bool(line_end) or len(start) < READ_BYTES // 2  # else the line is cut, and nothing else starts like this


def part_bytes(files: list[InputFile]) -> int:
    """Size of a part: about 512 parts, within bounds that suit two workers as well as two hundred."""
    return min(max(sum(file.size for file in files) // PARTS, MIN_PART_BYTES), MAX_PART_BYTES)


def split_file(file_index: int, file: InputFile, size: int, max_line_bytes: int) -> Iterator[InputSlice]:
    """Yield the parts of one file in order: byte ranges of ``size`` for JSON lines and plain text (all of it if the
    file is one document), a row group each for parquet, blocks of decompressed lines (with their data) for compressed
    files. The cuts depend only on the file and these arguments. Raises UserError for a damaged file."""
    if file.kind == "file":
        size = max(file.size, 1)
    if file.kind in ("plain", *TEXT):
        for number, start in enumerate(range(0, file.size, size)):
            stop = min(start + size, file.size)
            yield InputSlice(file_index, number, file, start, stop, weight=stop - start)
    elif file.kind == "parquet":
        groups = open_parquet(file.path).num_row_groups
        for number in range(groups):
            yield InputSlice(file_index, number, file, number, number + 1, weight=file.size // groups)
    else:
        start = 0
        for number, (data, position) in enumerate(_decompressed_parts(file, size, max_line_bytes)):
            yield InputSlice(file_index, number, file, data=data, weight=position - start)
            start = position


def open_parquet(path: str) -> ParquetFile:
    """A ``pyarrow.parquet.ParquetFile``. Raises ValueError: damaged, or pyarrow is missing."""
    library = require("pyarrow.parquet", f"--input {path}")
    try:
        return library.ParquetFile(path)
    except Exception as error:  # pyarrow's errors have no common base below Exception
        raise UserError(f"--input {path} is not a readable parquet file: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return the message of a library's error without line ends."""
    return " ".join(str(error).split())


def _decompressed_parts(file: InputFile, size: int, max_line_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (block of complete lines, position in the compressed file). Of a line longer than ``max_line_bytes`` more
    is kept than that, but not all, so that it is still seen to be too long."""
    pending: list[bytes] = []
    length = 0  # bytes in pending
    tail = 0  # bytes in pending after the last line end
    position = 0
    for block, position in _decompress(file):
        cut = block.rfind(b"\n") + 1
        if cut == 0 and tail > max_line_bytes:
            continue
        if cut and tail > max_line_bytes:  # the rest of the long line is dropped up to its end
            block = block[block.find(b"\n") :]
            cut = block.rfind(b"\n") + 1
        pending.append(block)
        length += len(block)
        tail = len(block) - cut if cut else tail + len(block)
        if cut and length >= size:
            pending[-1] = block[:cut]
            yield b"".join(pending), position
            pending, length = [block[cut:]], len(block) - cut
    if length:
        yield b"".join(pending), position


def _decompress(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Concatenated members and frames are read one after another, zero padding after gzip members is ignored."""
    with open_regular(file.path) as stream:
        make = _decompressor_factory(file)
        decompressor, fresh = make(), True
        while data := stream.read(READ_BYTES):
            while data:
                if fresh and file.kind == "gzip" and not data.strip(b"\0"):
                    break  # zero padding after the last member
                block, data = _step(file, decompressor, data)
                fresh = decompressor.eof
                if fresh:
                    decompressor = make()
                if block:
                    yield block, stream.tell()
        if not fresh and file.kind == "gzip":  # what did not fit the last bounded block
            try:
                block = decompressor.flush()
            except zlib.error as error:
                raise UserError(f"--input {file.path} is damaged: {error}") from error
            fresh = decompressor.eof
            if block:
                yield block, file.size
        if not fresh:
            raise UserError(f"--input {file.path} is truncated: its compressed data ends before its end mark")


def _step(file: InputFile, decompressor: Any, data: bytes) -> tuple[bytes, bytes]:
    """Return (decompressed bytes, compressed bytes that are left). gzip blocks have a limited size."""
    try:
        if file.kind == "gzip":
            block = decompressor.decompress(data, 4 * READ_BYTES)  # limit for the size of a decompressed block
            return block, decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail
        return decompressor.decompress(data), decompressor.unused_data
    except Exception as error:  # zlib.error, zstandard.ZstdError
        raise UserError(f"--input {file.path} is damaged: {error}") from error


def _decompressor_factory(file: InputFile) -> Callable[[], Any]:
    if file.kind == "gzip":
        return lambda: zlib.decompressobj(31)
    library = require("zstandard", f"--input {file.path}")
    return lambda: library.ZstdDecompressor().decompressobj()
