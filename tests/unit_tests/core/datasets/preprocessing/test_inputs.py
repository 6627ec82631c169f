"""Inputs of the pipeline: compressed and damaged files, parquet, globs, folders and unusable lines."""

import gzip
import json
import os

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.preprocessing.inputs import find_inputs
from megatron.core.datasets.preprocessing.pipeline import NoDocuments, TooManyBadLines
from tests.test_utils.preprocessing import DOCUMENTS, compressed, jsonl, pair, run, texts


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("workers", [1, 2])
def test_compressed_input_and_concatenated_members(tmp_path, reference, kind, workers):
    data = jsonl()
    path = compressed(tmp_path, kind, [data[:5001], data[5001:5002], data[5002:]])
    _, prefix = run(tmp_path, [str(path)], append_eod=True, workers=workers)
    assert pair(prefix) == reference


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("missing", [1, 8, 300])
def test_truncated_compressed_input_is_an_error_naming_the_file(tmp_path, kind, missing):
    path = compressed(tmp_path, kind, [jsonl()])
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(ValueError, match=f"{path.name}.* is truncated"):
        run(tmp_path, [str(path)])
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".bin", ".idx"))]


def test_damaged_and_misnamed_compressed_input(tmp_path):
    path = compressed(tmp_path, "gz", [jsonl()])
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="is damaged|is truncated"):
        run(tmp_path, [str(path)])
    plain = tmp_path / "plain.gz"
    plain.write_bytes(jsonl())
    with pytest.raises(ValueError, match="named like gzip but its content is plain"):
        run(tmp_path, [str(plain)])


def test_parquet_with_many_row_groups(tmp_path, reference):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "input.parquet"
    table = pyarrow.table({"text": DOCUMENTS, "other": list(range(len(DOCUMENTS)))})
    pyarrow.parquet.write_table(table, path, row_group_size=70)
    _, prefix = run(tmp_path, [str(path)], append_eod=True, workers=2)
    assert pair(prefix) == reference
    with pytest.raises(ValueError, match="no such column .* it has text, other"):
        run(tmp_path, [str(path)], "other", json_keys=["title"])
    totals, _ = run(tmp_path, [str(path)], "numbers", json_keys=["text"], max_bad_lines=0)
    assert totals.bad_lines == 0


def test_other_files_of_a_folder_are_named(tmp_path, caplog):
    for name in ("a.jsonl", "notes.txt", ".hidden"):
        (tmp_path / name).write_text("{}\n")
    assert [file.path for file in find_inputs([str(tmp_path)])] == [str(tmp_path / "a.jsonl")]
    assert "skips 1 file(s)" in caplog.text and "notes.txt" in caplog.text and "hidden" not in caplog.text


def test_files_globs_and_folders(tmp_path, reference):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(DOCUMENTS[:100]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(DOCUMENTS[100:200])))
    (folder / "c.json").write_bytes(jsonl(DOCUMENTS[200:]))
    (folder / "README.md").write_text("not data")
    for number, source in enumerate(([str(folder)], [str(folder / "[ab]*"), str(folder / "c.json")])):
        _, prefix = run(tmp_path, source, f"out{number}", append_eod=True)
        assert pair(prefix) == reference


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("none.jsonl", "no such file"),
        ("none*.jsonl", "no such file"),
        ("empty", "holds no .jsonl"),
        ("pipe", "not a regular file"),
    ],
)
def test_unusable_input_is_rejected(tmp_path, source, reason):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=reason):
        run(tmp_path, [str(tmp_path / source)])
    assert not os.path.exists(tmp_path / "out.partial")


BAD_LINES = {
    "malformed": (b'{"text": "a"', "malformed JSON"),
    "invalid utf-8": (b'{"text": "a\xff"}', "invalid UTF-8"),
    "lone surrogate": (b'{"text": "a\\ud800"}', "lone surrogate"),
    "empty": (b"", "empty line"),
    "blank": (b" \t\r", "empty line"),
    "missing key": (b'{"txt": "a"}', "no key 'text'"),
    "number": (b'{"text": 5}', "not a string but a number"),
    "null": (b'{"text": null}', "not a string but null"),
    "list": (b'["text"]', "not a JSON object"),
    "string": (b'"text"', "not a JSON object"),
    "nul": (b'{"text": "a\x00b"}', "malformed JSON"),
    "deep": (b"[" * 100_000, "malformed JSON|longer"),
    "huge": (b'{"text": "' + b"y" * 20_000 + b'"}', "longer than --max-line-bytes 9000"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("form", ["plain", "gzip"])
def test_bad_lines_are_skipped_counted_and_listed(tmp_path, reference, form, workers):
    lines = jsonl().splitlines(keepends=True)
    expected = []
    for number, (line, reason) in enumerate(BAD_LINES.values()):
        lines.insert(3 + 20 * number, line + b"\n")
        expected.append((4 + 20 * number, reason))
    path = tmp_path / ("in.jsonl" if form == "plain" else "in.jsonl.gz")
    path.write_bytes(b"".join(lines) if form == "plain" else gzip.compress(b"".join(lines)))
    totals, prefix = run(tmp_path, [str(path)], append_eod=True, max_line_bytes=9000, workers=workers)
    assert pair(prefix) == reference  # good lines give the bytes of a clean run
    assert totals.bad_lines == len(BAD_LINES)
    entries = [json.loads(line) for line in open(prefix + ".bad_lines.jsonl", encoding="utf-8")]  # noqa: SIM115
    assert [entry["line"] for entry in entries] == [line for line, _ in expected]
    for entry, (_, reason) in zip(entries, expected):
        assert any(part in entry["reason"] for part in reason.split("|")) and entry["file"] == str(path)


def test_the_same_lines_are_bad_without_orjson(tmp_path, monkeypatch):
    data = b"\n".join([line for line, _ in BAD_LINES.values()] + [b'{"text": "x", "n": NaN}', b'{"text": "y\\u0000"}'])
    one, first = run(tmp_path, data, "one")
    monkeypatch.setattr("megatron.core.datasets.preprocessing.lines.is_installed", lambda name: False)
    other, second = run(tmp_path, data, "two")
    assert one.bad_lines == other.bad_lines == len(BAD_LINES) - 1  # "huge" is short of the default limit
    assert pair(first) == pair(second)


@pytest.mark.parametrize("workers", [1, 3])
def test_limit_and_strict(tmp_path, workers):
    lines = jsonl().splitlines(keepends=True)
    for place in (250, 100, 17):
        lines.insert(place, b"{broken\n")
    data = b"".join(lines)
    for options, reason in (({"strict": True}, "line 18: malformed"), ({"max_bad_lines": 2}, "3 unusable lines")):
        with pytest.raises(TooManyBadLines, match=reason):
            run(tmp_path, data, "bad", workers=workers, overwrite=True, **options)
        assert os.path.exists(tmp_path / "bad.bad_lines.jsonl")
        assert not os.path.exists(tmp_path / "bad_text_document.idx")
    totals, _ = run(tmp_path, data, "good", workers=workers, max_bad_lines=3)
    assert totals.bad_lines == 3


def test_a_wrong_key_is_an_error_not_an_empty_data_set(tmp_path):
    with pytest.raises(NoDocuments, match="no usable document .* in 300 lines.*is --json-keys right"):
        run(tmp_path, jsonl(), json_keys=["content"])


def test_byte_order_mark_crlf_and_no_last_newline(tmp_path, reference):
    data = b"\xef\xbb\xbf" + jsonl().replace(b"\n", b"\r\n")[:-2]
    totals, prefix = run(tmp_path, data, append_eod=True)
    assert pair(prefix) == reference and totals.bad_lines == 0


def test_empty_documents_are_left_out_and_counted(tmp_path, reference):
    lines = jsonl().splitlines(keepends=True)
    for place in (0, 50, 51, 302):
        lines.insert(place, b'{"text": ""}\n')
    totals, prefix = run(tmp_path, b"".join(lines), append_eod=True)
    assert pair(prefix) == reference and totals.empty_documents == 4


def write_parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)


NO_TOKENS = ["a.jsonl", "b.jsonl", "d.jsonl.gz", "e.jsonl.zst", "f.parquet", "g.parquet"]
"""Files of the next test that are valid, with any number of keys."""


@pytest.mark.parametrize("files, options", [
    *(([name], {}) for name in [*NO_TOKENS, "c.jsonl", "h.txt"]),
    *((NO_TOKENS, options) for options in (
        {"workers": 2, "partitions": 2}, {"split_sentences": True, "append_eod": True}, {"append_eod": True},
        {"strict": True}, {"json_keys": ["text", "title"]})),
    (["c.jsonl", "h.txt"], {"text_documents": "paragraph"}),
])  # fmt: skip
def test_input_without_tokens_is_an_error_that_writes_nothing(tmp_path, files, options):
    """Files without bytes, without rows, with empty or blank texts, and several such files."""
    keys = options.get("json_keys", ["text"])
    empty = json.dumps(dict.fromkeys(keys, "")).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(empty * 3)
    (tmp_path / "c.jsonl").write_bytes(b"\n  \n")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(empty))
    (tmp_path / "e.jsonl.zst").write_bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(empty))
    pyarrow = pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "f.parquet", **{key: pyarrow.array([], pyarrow.string()) for key in keys})
    write_parquet(tmp_path / "g.parquet", **{key: [""] for key in keys})
    (tmp_path / "h.txt").write_bytes(b"\n \r\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(NoDocuments, match=f"no usable document for --json-keys {' '.join(keys)} .* nothing is written"):
        run(tmp_path, [str(tmp_path / name) for name in files], **options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_one_key_without_tokens_is_an_error(tmp_path):
    data = b"".join(json.dumps({"text": text, "title": ""}).encode() + b"\n" for text in DOCUMENTS)
    with pytest.raises(NoDocuments, match="no usable document for --json-keys title in 300 lines of 1 file"):
        run(tmp_path, data, json_keys=["text", "title"])


def test_unusable_input_keeps_existing_output(tmp_path, reference):
    _, prefix = run(tmp_path, jsonl(), append_eod=True)
    with pytest.raises(NoDocuments):
        run(tmp_path, b"{}\n", append_eod=True, overwrite=True)
    assert pair(prefix) == reference and not os.path.exists(prefix + ".partial")


def test_a_file_without_documents_among_others_is_named(tmp_path, caplog):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "other.jsonl").write_bytes(b'{"content": "x"}\n')
    (tmp_path / "good.jsonl").write_bytes(jsonl())
    caplog.set_level("WARNING")
    totals, _ = run(tmp_path, [str(tmp_path / name) for name in ("empty.jsonl", "good.jsonl", "other.jsonl")])
    assert totals.documents == 300
    assert f"2 of 3 files have no document: {tmp_path}/empty.jsonl, {tmp_path}/other.jsonl" in caplog.text


def test_parquet_with_two_columns_of_a_name_is_rejected(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UserError, match="--json-keys text: 2 columns have this name in .*x.parquet"):
        run(tmp_path, [str(tmp_path / "x.parquet")])


def test_bad_rows_of_parquet_are_listed_as_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    binary = pyarrow.array([b"good", b"\xff\xfe", b"fine", None, b"end"])
    column = pyarrow.StringArray.from_buffers(5, *[binary.buffers()[i] for i in (1, 2, 0)])
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    _, prefix = run(tmp_path, [str(tmp_path / "x.parquet")])
    assert texts(prefix) == ["good", "fine", "end"]
    entries = [json.loads(line) for line in open(prefix + ".bad_lines.jsonl", encoding="utf-8")]  # noqa: SIM115
    assert [(entry["row"], entry["reason"]) for entry in entries] == [
        (2, "invalid UTF-8 at byte 0"),
        (4, "the value of 'text' is not a string but null"),
    ]
    with pytest.raises(TooManyBadLines, match="x.parquet, row 2: invalid UTF-8"):
        run(tmp_path, [str(tmp_path / "x.parquet")], "strict", strict=True)


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_damaged_inputs_give_one_message_with_the_file(tmp_path, form, caplog):
    """Random damage of every format: either the run ends with a UserError that names the file, or its bad lines are
    counted and the other documents are as they were."""
    generator = np.random.default_rng(7)
    good = tmp_path / f"good.{form}"
    if form == "parquet":
        write_parquet(good, text=DOCUMENTS[:40], other=[list(range(n % 3)) for n in range(40)])
    elif form == "txt":
        good.write_text("\n\n".join(DOCUMENTS[:40]))
    else:
        data = jsonl(DOCUMENTS[:40])
        good.write_bytes(data) if form == "jsonl" else compressed(tmp_path, form[6:], [data]).rename(good)
    intact, outcomes = good.read_bytes(), set()
    path = tmp_path / f"bad.{form}"
    for number in range(60):
        data = bytearray(intact)
        kind = number % 4
        place = int(generator.integers(len(data)))
        if kind == 0:
            data[place] ^= 1 << int(generator.integers(8))
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[place : place + 8] = generator.bytes(8)
        else:
            data += generator.bytes(int(generator.integers(1, 40)))
        path.write_bytes(data)
        try:
            totals, _ = run(tmp_path, [str(path)], overwrite=True, text_documents="paragraph")
            outcomes.add("bad lines" if totals.bad_lines else "read")
            assert totals.documents + totals.bad_lines + totals.empty_documents > 0
        except UserError as error:
            outcomes.add("refused")
            assert str(path) in str(error) and "\n" not in str(error), error
    assert outcomes & {"refused", "bad lines"}


def test_a_long_line_of_many_parts_is_read_once(tmp_path):
    documents = ["a" * 20_000, "b", "c" * 9_000, "d" * 4_096]
    _, prefix = run(tmp_path, jsonl(documents), workers=2)
    assert texts(prefix) == documents
