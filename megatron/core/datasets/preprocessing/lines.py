"""From one part of the input to documents: for each line the texts of the wanted keys, or the reason why it is
unusable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron.core.config.errors import UserError, listed
from megatron.core.datasets.preprocessing.inputs import READ_BYTES, TEXT, InputSlice, one_line, open_parquet
from megatron.core.datasets.preprocessing.plain_text import BYTE_ORDER_MARK, read_documents
from megatron.core.safe_files import open_regular
from megatron.core.tokenizers.libraries import is_installed, require


@dataclass(frozen=True)
class BadLine:
    """Why a line is skipped."""

    reason: str


def read_rows(part: InputSlice, keys: Sequence[str], max_line_bytes: int) -> Iterator[tuple[list[str] | BadLine, int]]:
    """Yield (texts of ``keys`` or BadLine, size in bytes) for each line of ``part`` (plain text: document; parquet:
    row, its size in characters), also for empty lines. Removes a byte order mark at the start of a file. Raises
    UserError only for damaged files or missing columns."""
    if part.file.kind == "parquet":
        yield from _parquet_rows(part, keys)
        return
    if part.file.kind in TEXT:
        yield from _text_rows(part, max_line_bytes)
        return
    lines = _plain_lines(part, max_line_bytes) if part.data is None else _split_lines(part.data)
    if lines and part.number == 0 and lines[0].startswith(BYTE_ORDER_MARK):
        lines[0] = lines[0][len(BYTE_ORDER_MARK) :]
    parse = row_parser(keys, max_line_bytes)
    for line in lines:
        yield parse(line), len(line) + 1


def _text_rows(part: InputSlice, max_bytes: int) -> Iterator[tuple[list[str] | BadLine, int]]:
    """Documents that are too long or not UTF-8 are BadLines."""
    for content, size in read_documents(part, max_bytes):
        if content is None:
            shorter = "; cut it with --text-documents paragraph or line" if part.file.kind == "file" else ""
            yield BadLine(f"longer than --max-line-bytes {max_bytes}{shorter}"), size
            continue
        try:
            yield [content.decode("utf-8")], size
        except UnicodeDecodeError as error:
            yield BadLine(f"invalid UTF-8 at byte {error.start}"), size


def _split_lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _plain_lines(part: InputSlice, max_line_bytes: int) -> list[bytes]:
    """The last line may end after the range. Of a too long line only one byte more than the limit is read."""
    with open_regular(part.file.path) as file:
        position = part.start
        if position:
            file.seek(position - 1)
            block = file.read(READ_BYTES)
            position -= 1
            while block and (end := block.find(b"\n")) < 0:
                position += len(block)
                if position >= part.stop:
                    return []
                block = file.read(READ_BYTES)
            position += end + 1 if block else 0
            if not block or position >= part.stop:
                return []
            file.seek(position)
        data = bytearray(file.read(part.stop - position))
        begun = len(data) - (data.rfind(b"\n") + 1)  # bytes of a line that continues after the range
        while begun and begun <= max_line_bytes:
            block = file.readline(min(READ_BYTES, max_line_bytes + 1 - begun))
            data += block
            begun += len(block)
            if not block or block.endswith(b"\n"):
                break
    return _split_lines(bytes(data))


def row_parser(keys: Sequence[str], max_line_bytes: int) -> Callable[[bytes], list[str] | BadLine]:
    """Return a function from a JSON line (bytes) to the texts of ``keys``, or to a BadLine: too long, malformed JSON,
    invalid UTF-8, a missing key, a value that is not a string. Uses orjson if installed; the results are equal."""
    quick: Callable[[bytes], Any] = require("orjson", "--input").loads if is_installed("orjson") else _no_quick_parser
    names = list(keys)

    def parse(line: bytes) -> list[str] | BadLine:
        if len(line) > max_line_bytes:
            return BadLine(f"longer than --max-line-bytes {max_line_bytes}")
        try:
            document = quick(line)
        except ValueError:
            document = _careful_parse(line)
            if isinstance(document, BadLine):
                return document
        try:
            texts = [document[key] for key in names]
        except (KeyError, TypeError, IndexError):
            return _why_no_texts(document, names)
        for key, text in zip(names, texts):
            if type(text) is not str:
                return BadLine(f"the value of {key!r} is not a string but {_json_type(text)}")
        return texts

    return parse


def _no_quick_parser(line: bytes) -> NoReturn:
    raise ValueError


def _careful_parse(line: bytes) -> object:
    """Python's ``json`` accepts more than orjson (such as NaN); else return a BadLine with the reason."""
    if not line.strip():
        return BadLine("empty line")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadLine(f"invalid UTF-8 at byte {error.start}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of more than 4300 digits
        return BadLine(f"malformed JSON: {error}")
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return BadLine("lone surrogate: the text is not valid Unicode")
    return document


def _why_no_texts(document: object, keys: Sequence[str]) -> BadLine:
    if not isinstance(document, dict):
        return BadLine(f"not a JSON object but {_json_type(document)}")
    missing = next(key for key in keys if key not in document)
    return BadLine(f"has no key {missing!r}")


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", int: "a number", float: "a number", bool: "a boolean", str: "a string"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _parquet_rows(part: InputSlice, keys: Sequence[str]) -> Iterator[tuple[list[str] | BadLine, int]]:
    """Values that are not strings, or not UTF-8, make a BadLine of size 0."""
    for columns in _parquet_batches(part, keys):
        for values in zip(*columns):
            row = [_parquet_text(key, value) for key, value in zip(keys, values)]
            bad = next((text for text in row if isinstance(text, BadLine)), None)
            texts = [text for text in row if isinstance(text, str)]
            yield (texts, sum(map(len, texts))) if bad is None else (bad, 0)


def _parquet_batches(part: InputSlice, keys: Sequence[str]) -> Iterator[list[Any]]:
    """Yield arrow arrays, 1024 rows at a time. Raises UserError for a missing or repeated column or damage."""
    source = open_parquet(part.file.path)
    names = source.schema_arrow.names
    for key in keys:
        if names.count(key) != 1:
            problem = "no such column" if key not in names else f"{names.count(key)} columns have this name"
            raise UserError(f"--json-keys {key}: {problem} in {part.file.path}; it has {listed(names)}")
    try:
        for batch in source.iter_batches(batch_size=1024, row_groups=range(part.start, part.stop), columns=list(keys)):
            yield [batch.column(key) for key in keys]
    except Exception as error:  # pyarrow's errors have no common base below Exception
        raise UserError(f"--input {part.file.path} is damaged in row group {part.start}: {one_line(error)}") from error


def _parquet_text(key: str, value: Any) -> str | BadLine:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return BadLine(f"invalid UTF-8 at byte {error.start}")
    return text if isinstance(text, str) else BadLine(f"the value of {key!r} is not a string but {_json_type(text)}")
