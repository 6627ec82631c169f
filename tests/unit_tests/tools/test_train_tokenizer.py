"""tools/train_tokenizer.py: which files it is trained on, and what it says about them."""

import gzip
import json

import pytest

from megatron.console import run_tool

LINE = json.dumps({"text": "the cat sat on the mat"}) + "\n"


def train(folder, *names, **flags):
    argv = ["--input", *(str(folder / name) for name in names), "--vocab-size", "300", "--output", str(folder / "tok")]
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}", *value.split()]
    return run_tool("train-tokenizer", argv)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("the cat\n\nsat on\n\nthe mat\n")
    (tmp_path / "b.jsonl").write_text(LINE * 3 + "nonsense\n")
    (tmp_path / "wrong.jsonl").write_text('{"content": "the cat"}\n' * 5)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((LINE * 2).encode()))
    return tmp_path


def test_texts_and_bytes_are_counted_per_file(folder, capsys):
    assert train(folder, "a.txt", "b.jsonl", "c.jsonl.gz") == 0
    text = capsys.readouterr().out
    assert f"{folder}/a.txt: 1 texts, 24 bytes\n" in text
    assert f"{folder}/b.jsonl: 3 texts, 66 bytes, 1 unusable lines, the first: line 4: malformed JSON" in text
    assert f"{folder}/c.jsonl.gz: 2 texts, 44 bytes\n" in text
    assert f"wrote {folder}/tok/tokenizer.json: " in text
    assert train(folder, "a.txt", text_documents="paragraph") == 0
    assert f"{folder}/a.txt: 3 texts, 20 bytes\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
@pytest.mark.parametrize("names, message", [
    (["wrong.jsonl"], "wrong.jsonl: no text for --json-keys text in 5 lines; line 1: has no key 'text'; is"),
    (["a.txt", "wrong.jsonl", "b.jsonl"], "wrong.jsonl: no text for --json-keys text in 5 lines; line 1: has no key"),
    (["b.jsonl", "empty.jsonl"], "empty.jsonl: no text for --json-keys text in 0 lines; remove it from --input"),
    (["blank.jsonl", "b.jsonl"], "blank.jsonl: no text for --json-keys text in 1 lines; remove it from --input"),
])  # fmt: skip
def test_a_file_without_text_is_an_error_that_writes_nothing(folder, capsys, kind, names, message):
    assert train(folder, *names, kind=kind) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (folder / "tok").exists()


def test_files_after_max_bytes_are_not_read_and_counted(folder, capsys):
    assert train(folder, "b.jsonl", "wrong.jsonl", max_bytes="30") == 0
    text = capsys.readouterr().out
    assert f"{folder}/b.jsonl: 2 texts, 44 bytes\n" in text and "1 of 2 files were not read" in text
    assert train(folder, "b.jsonl", max_bytes="0") == 2
    assert "--max-bytes 0: must be at least 1" in capsys.readouterr().err
