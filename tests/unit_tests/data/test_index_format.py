"""A damaged pair is rejected when it is opened, with the reason; no input crashes the parser."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.index_format import HEADER_BYTES, IndexedDatasetError
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

LENGTHS = [3, 2, 0, 4]
LENGTHS_AT, POINTERS_AT, DOCUMENTS_AT = HEADER_BYTES, HEADER_BYTES + 16, HEADER_BYTES + 16 + 32


@pytest.fixture
def prefix(tmp_path):
    path = str(tmp_path / "data")
    with IndexedDatasetBuilder(path + ".bin", np.uint16) as builder:
        for length in LENGTHS:
            builder.add_document(np.arange(length), [length])
        builder.finalize(path + ".idx")
    return path


def patch(path, at, data):
    content = bytearray(Path(path).read_bytes())
    content[at : at + len(data)] = data
    Path(path).write_bytes(content)


DAMAGE = {
    "empty idx": (".idx", lambda data: b"", "is empty"),
    "header cut": (".idx", lambda data: data[:20], r"ends within its header \(20 of 34 bytes\)"),
    "idx cut": (".idx", lambda data: data[:-8], "truncated"),
    "idx grown": (".idx", lambda data: data + b"12345678", "has grown"),
    "bin cut": (".bin", lambda data: data[:-2], "data.bin is truncated: its index announces 18 bytes, it has 16"),
    "bin grown": (".bin", lambda data: data + b"ab", "data.bin has grown"),
    "bin empty": (".bin", lambda data: b"", "data.bin is empty"),
    "odd bin": (".bin", lambda data: data[:-1], "17 bytes, which is no whole number of uint16 tokens"),
    "text": (".idx", lambda data: b'{"text": "hello, this is not an index"}', "is no index file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_rejected_with_the_reason(prefix, name):
    suffix, change, reason = DAMAGE[name]
    path = Path(prefix + suffix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(IndexedDatasetError, match=reason) as caught:
        IndexedDataset(prefix)
    assert isinstance(caught.value, ValueError) and "tools/preprocess_data.py" in str(caught.value)


FIELDS = {
    "magic": (0, b"MMIDIDY", "is no index file"),
    "version": (9, struct.pack("<Q", 2), "version 2"),
    "byte order": (9, struct.pack(">Q", 1), "byte-swapped"),
    "dtype 0": (17, b"\x00", "dtype code 0"),
    "dtype 9": (17, b"\x09", "dtype code 9"),
    "huge count": (18, struct.pack("<Q", 2**63), "truncated"),
    "no documents": (26, struct.pack("<Q", 0), "no document boundaries"),
    "other dtype": (17, b"\x04", "no whole number of int32"),
    "negative length": (LENGTHS_AT, struct.pack("<2i", -1, 6), "negative length -1 at sequence 0"),
    "falling pointer": (POINTERS_AT + 8, struct.pack("<q", -6), "not monotone: sequence 0"),
    "wrong pointer": (POINTERS_AT + 8, struct.pack("<q", 8), "disagree with the lengths: sequence 0 has 3 tokens"),
    "first pointer": (POINTERS_AT, struct.pack("<q", 2), "first sequence at byte 2"),
    "last pointer": (POINTERS_AT + 24, struct.pack("<q", 1000), "truncated"),
    "first document": (DOCUMENTS_AT, struct.pack("<q", 1), "first document at sequence 1"),
    "last document": (DOCUMENTS_AT + 32, struct.pack("<q", 3), "last document at sequence 3, but has 4"),
    "falling document": (DOCUMENTS_AT + 8, struct.pack("<q", 3), "fall after document 1"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_fields_are_rejected_with_the_reason(prefix, name):
    at, data, reason = FIELDS[name]
    patch(prefix + ".idx", at, data)
    with pytest.raises(IndexedDatasetError, match=reason):
        IndexedDataset(prefix)


def test_damage_after_the_first_piece_is_detected(prefix, monkeypatch):
    monkeypatch.setattr("megatron.data.index_format.CHECK_CHUNK", 2)
    IndexedDataset(prefix)
    patch(prefix + ".idx", POINTERS_AT + 16, struct.pack("<q", 8))
    with pytest.raises(IndexedDatasetError, match="sequence 1 has 2 tokens"):
        IndexedDataset(prefix)


fuzz = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_or_refuse(prefix):
    try:
        data = IndexedDataset(prefix)
    except IndexedDatasetError:
        return
    for sequence in range(min(len(data), 20)):  # believed: then everything must be readable
        assert len(data[sequence]) == data.sequence_lengths[sequence]


@fuzz
@given(index=st.binary(max_size=200), tokens=st.binary(max_size=40))
def test_random_bytes_never_crash(tmp_path, index, tokens):
    prefix = str(tmp_path / "fuzz")
    Path(prefix + ".idx").write_bytes(index)
    Path(prefix + ".bin").write_bytes(tokens)
    open_or_refuse(prefix)


@fuzz
@given(
    edits=st.lists(st.tuples(st.integers(0, 121), st.integers(0, 255)), min_size=1, max_size=6), cut=st.integers(0, 122)
)
def test_mutated_index_never_crashes(prefix, edits, cut):
    original = Path(prefix + ".idx").read_bytes()
    content = bytearray(original)
    for at, value in edits:
        content[at] = value
    Path(prefix + ".idx").write_bytes(content[:cut] if cut > 60 else content)
    try:
        open_or_refuse(prefix)
    finally:
        Path(prefix + ".idx").write_bytes(original)


@fuzz
@given(
    code=st.integers(0, 255),
    sequences=st.integers(0, 2**64 - 1) | st.integers(0, 6),
    documents=st.integers(0, 2**64 - 1) | st.integers(0, 6),
    body=st.lists(st.integers(-4, 6), max_size=40),
)
def test_plausible_headers_never_crash(tmp_path, code, sequences, documents, body):
    prefix = str(tmp_path / "fuzz")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, sequences, documents)
    Path(prefix + ".idx").write_bytes(header + np.array(body, dtype="<i4").tobytes())
    Path(prefix + ".bin").write_bytes(b"\x00" * 16)
    open_or_refuse(prefix)
