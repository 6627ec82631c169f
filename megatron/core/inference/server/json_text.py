"""JSON of answers, written in pieces: the encoder blocks all threads during a piece."""

from __future__ import annotations

import json
from collections.abc import Iterator

BLOCK = 64
"""Entries of a long list in a piece."""


def json_bytes(value: object) -> bytes:
    """Return ``value`` as JSON in UTF-8. Lone surrogates become "?". ValueError for NaN and infinities."""
    return "".join(_pieces(value)).encode("utf-8", "replace")


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for number, (name, entry) in enumerate(value.items()):
            yield f"{',' if number else '{'}{json.dumps(name, ensure_ascii=False)}:"
            yield from _pieces(entry)
        yield "}"
    elif isinstance(value, list) and len(value) > BLOCK:
        for start in range(0, len(value), BLOCK):
            yield "," if start else "["
            yield _text(value[start : start + BLOCK])[1:-1]
        yield "]"
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        for number, entry in enumerate(value):
            yield "," if number else "["
            yield from _pieces(entry)
        yield "]"
    else:
        yield _text(value)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
