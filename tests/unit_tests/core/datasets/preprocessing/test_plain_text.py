"""Plain text input: which documents a file holds, wherever it is cut into parts."""

import re

import numpy as np
import pytest

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.core.datasets.preprocessing import plain_text
from megatron.core.datasets.preprocessing.inputs import find_inputs, split_file
from megatron.core.datasets.preprocessing.lines import BadLine, read_rows
from megatron.data.indexed_dataset import IndexedDataset

PIECES = [b"a", b"bc d", b"\n", b"\n\n", b"\r\n", b" \n", b"\t", b"\n \n\n", "é".encode(), b"long line of words"]


def expected_documents(data, separator):
    text = data.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    lines = text.split("\n")
    if separator == "file":
        return [text.strip("\n")] if text.strip() else []
    if separator == "line":
        return [line for line in lines if line.strip()]
    groups = re.split(r"\n(?:[ \t]*\n)+", "\n" + text + "\n\n")
    stripped = ["\n".join(line for line in group.split("\n") if line.strip()) for group in groups]
    return [group for group in stripped if group]


def read(path, separator, size, max_bytes=1 << 20):
    (file,) = find_inputs([str(path)], text=separator)
    parts = split_file(0, file, size, max_bytes)
    return [row for part in parts for row, _ in read_rows(part, ["text"], max_bytes)]


@pytest.mark.parametrize("separator", ["file", "paragraph", "line"])
@pytest.mark.parametrize("seed", range(30))
def test_documents_do_not_depend_on_the_cuts(tmp_path, monkeypatch, separator, seed):
    generator = np.random.default_rng(seed)
    data = b"".join(PIECES[i] for i in generator.integers(0, len(PIECES), 40))
    data = (b"\xef\xbb\xbf" if seed % 3 == 0 else b"") + data
    path = tmp_path / "x.txt"
    path.write_bytes(data)
    expected = expected_documents(data, separator)
    monkeypatch.setattr(plain_text, "READ_BYTES", int(generator.integers(12, 20)))
    monkeypatch.setattr(plain_text, "LOOK_BACK", int(generator.integers(1, 5)))
    for size in [*range(1, 12), len(data)]:
        assert [text for (text,) in read(path, separator, size)] == expected, size


def test_too_long_and_undecodable_documents_are_bad(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"good\n\n" + b"x" * 50 + b"\n" + b"y" * 50 + b"\n\n\xff\n\nlast")
    rows = read(path, "paragraph", 7, max_bytes=60)
    assert rows == [["good"], BadLine("longer than --max-line-bytes 60"), BadLine("invalid UTF-8 at byte 0"), ["last"]]
    cut = "longer than --max-line-bytes 60; cut it with --text-documents paragraph or line"
    assert read(path, "file", 7, max_bytes=60) == [BadLine(cut)]
    assert read(path, "file", 7, max_bytes=200) == [BadLine("invalid UTF-8 at byte 109")]


def test_txt_files_of_json_lines_stay_json_lines(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text('\n{"text": "a b"}\n{"text": "c"}\n')
    assert find_inputs([str(path)])[0].kind == "plain"
    path.write_text("{not json} but text\n")
    assert find_inputs([str(path)])[0].kind == "file"


def test_a_folder_of_text_files_is_read_unless_it_holds_data_files(tmp_path):
    (tmp_path / "b.txt").write_text("two\n")
    (tmp_path / "a.txt").write_text("one\n")
    assert [file.path for file in find_inputs([str(tmp_path)])] == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n')
    assert [file.path for file in find_inputs([str(tmp_path)])] == [str(tmp_path / "c.jsonl")]


def test_plain_text_has_one_key(tmp_path):
    (tmp_path / "x.txt").write_text("one\n")
    with pytest.raises(UserError, match=r"--json-keys a b: .*x.txt is plain text"):
        find_inputs([str(tmp_path / "x.txt")], ["a", "b"])


@pytest.mark.parametrize("flags, documents", [([], [b"one\ntwo\n\nthree"]),
                                              (["--text-documents", "paragraph"], [b"one\ntwo", b"three"]),
                                              (["--text-documents", "line"], [b"one", b"two", b"three"])])  # fmt: skip
@pytest.mark.parametrize("workers", [1, 2])
def test_preprocess_accepts_plain_text(tmp_path, flags, documents, workers, capsys):
    (tmp_path / "x.txt").write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n")
    argv = ["--input", str(tmp_path / "x.txt"), "--output-prefix", str(tmp_path / "out"), "--workers", str(workers)]
    assert run_tool("preprocess", [*argv, "--tokenizer-type", "ByteLevelTokenizer", *flags]) == 0
    data = IndexedDataset(str(tmp_path / "out_text_document"))
    assert [bytes(data[i].astype(np.uint8)) for i in range(len(data))] == documents


def test_bad_documents_are_counted_as_documents(tmp_path, capsys):
    (tmp_path / "x.txt").write_bytes(b"one\ntwo\n\n\xff\n")
    argv = ["--input", str(tmp_path / "x.txt"), "--output-prefix", str(tmp_path / "out"), "--strict", "--workers", "1"]
    cut = ["--text-documents", "paragraph"]
    assert run_tool("preprocess", [*argv, *cut, "--tokenizer-type", "ByteLevelTokenizer"]) == 2
    assert "x.txt, document 2: invalid UTF-8 at byte 0" in capsys.readouterr().err


def test_tokenizers_are_trained_on_plain_text(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("the cat sat on the mat\n\n" * 50)
    argv = ["--input", str(tmp_path / "x.txt"), "--vocab-size", "260", "--output", str(tmp_path / "tok")]
    assert run_tool("train-tokenizer", argv) == 0


def test_forty_text_files_are_forty_documents_and_the_log_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    (tmp_path / "books").mkdir()
    for number in range(40):
        (tmp_path / "books" / f"{number:02d}.txt").write_text(f"first {number}\n\nsecond {number}\n\nthird\n")
    argv = ["--input", "books", "--output-prefix", "out", "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    for flags, documents in ([], 40), (["--text-documents", "paragraph"], 120), (["--text-documents", "line"], 120):
        assert run_tool("preprocess", [*argv, *flags, "--overwrite"]) == 0
        unit = flags[1] if flags else "file"
        text = caplog.text
        caplog.clear()
        assert f"40 file(s) of plain text (--text-documents {unit}: one document per {unit})" in text
        assert f"{documents} documents" in text
        assert len(IndexedDataset("out_text_document")) == documents
