"""Documents of plain text files (``.txt``): one per file, one per paragraph (between blank lines), or one per line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from megatron.core.datasets.preprocessing.inputs import READ_BYTES, InputSlice
from megatron.core.safe_files import open_regular

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LOOK_BACK = 4096


def read_documents(part: InputSlice, max_bytes: int) -> Iterator[tuple[bytes | None, int]]:
    """Yield content and size of the documents that begin in the byte range of ``part``; the last may end after it.

    Content is None for a document of more than ``max_bytes``. Line ends become ``\\n``, those around a document are
    removed; a document of white space only is omitted."""
    if part.file.kind == "file":
        yield from _read_file(part, max_bytes)
        return
    one_per_line = part.file.kind == "line"
    content, size = bytearray(), 0  # of the current document; size 0: none
    with open_regular(part.file.path) as file:
        may_start = _seek_first_line(file, part, one_per_line)
        position, at_line_start = file.tell(), True
        while size or position < part.stop:
            piece = file.readline(READ_BYTES)  # a longer line comes in several pieces
            if not piece:
                break
            if position == 0:
                piece = piece.removeprefix(BYTE_ORDER_MARK)
            position = file.tell()
            ends_line = piece.endswith(b"\n")
            if at_line_start and not piece.strip():
                is_complete, may_start = True, True
            else:
                if size or may_start:  # else: the rest of a document that began before the range
                    size += len(piece)
                    content += piece if size <= max_bytes else b""
                is_complete = may_start = one_per_line and ends_line
            at_line_start = ends_line
            if is_complete and size:
                yield _content(content, size, max_bytes), size
                content, size = bytearray(), 0
    if size:
        yield _content(content, size, max_bytes), size


def _read_file(part: InputSlice, max_bytes: int) -> Iterator[tuple[bytes | None, int]]:
    """Yield content (None if longer than ``max_bytes``) and size of the only document, unless it is blank."""
    with open_regular(part.file.path) as file:
        text = file.read(max_bytes + 1).removeprefix(BYTE_ORDER_MARK)
    if len(text) > max_bytes or text.strip():
        yield _content(bytearray(text), part.file.size, max_bytes), part.file.size


def _content(content: bytearray, size: int, max_bytes: int) -> bytes | None:
    return bytes(content).replace(b"\r\n", b"\n").strip(b"\r\n") if size <= max_bytes else None


def _seek_first_line(file: BinaryIO, part: InputSlice, one_per_line: bool) -> bool:
    """Return whether a document may start there: at the start of the file, or after a blank line."""
    if part.start == 0:
        return True
    position = file.seek(part.start - 1)
    while position < part.stop and (piece := file.readline(READ_BYTES)):
        position += len(piece)
        if piece.endswith(b"\n"):
            break
    may_start = one_per_line or _follows_blank_line(file, position)
    file.seek(position)
    return may_start


def _follows_blank_line(file: BinaryIO, position: int) -> bool:
    """A byte order mark at the start of the file counts as blank. Moves ``file``."""
    file.seek(0)
    first = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
    end = position - 1  # without its line end
    while end > first:
        begin = max(first, end - LOOK_BACK)
        file.seek(begin)
        before, line_end, text = file.read(end - begin).rpartition(b"\n")
        if text.strip():
            return False
        if line_end:
            return True
        end = begin
    return True
