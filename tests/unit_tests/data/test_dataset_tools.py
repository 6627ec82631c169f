"""tools/check_dataset.py and tools/merge_datasets.py as a user runs them."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.console import run_tool
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.data.sidecar import SidecarInfo, read_sidecar, write_sidecar

ROOT = Path(__file__).resolve().parents[3]


def run(tool, *arguments):
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{prefix}.idx")


PARTS = [[[1, 2], [], [3]], [], [[4, 5, 6, 7]], [[8], [9]]]


def write_parts(folder, dtype=np.uint16):
    folder.mkdir()
    for number, documents in enumerate(PARTS):
        write(folder / f"part{number}", documents, dtype)


def info(fingerprint):
    return SidecarInfo("ByteLevel", fingerprint, 300, {"eod": 0}, True)


def test_merging_equals_writing_everything_at_once(tmp_path):
    write_parts(tmp_path / "parts")
    (tmp_path / "parts" / "notes.txt").write_text("not data")
    for number in range(len(PARTS)):
        write_sidecar(str(tmp_path / "parts" / f"part{number}"), info("abc"))
    result = run("merge_datasets.py", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "all")
    assert result.returncode == 0, result.stderr
    write(tmp_path / "once", [document for part in PARTS for document in part])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"once{suffix}").read_bytes()
    assert read_sidecar(str(tmp_path / "all")) == info("abc")
    assert "4/4" in result.stdout and "6 sequences" in result.stdout


def refused(tmp_path, *reasons):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = run("merge_datasets.py", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "all")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    for reason in reasons:
        assert reason in result.stderr
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_checking_data_without_tokens_is_an_error(tmp_path, capsys, documents):
    write(tmp_path / "empty", documents)
    write(tmp_path / "good", [[1, 2]])
    assert run_tool("check-data", [str(tmp_path / "good"), str(tmp_path / "empty")]) == 1
    output = capsys.readouterr()
    assert f"error: {tmp_path}/empty: holds no tokens" in output.err and output.out.count("  ok") == 1


def test_merging_refuses_before_it_writes(tmp_path):
    refused(tmp_path, "--input", "is no folder")
    write_parts(tmp_path / "parts")
    (tmp_path / "all.idx").write_bytes(b"precious")
    refused(tmp_path, "all.idx exists and is not overwritten")
    (tmp_path / "all.idx").unlink()
    write(tmp_path / "parts" / "wide", [[1]], np.int32)
    refused(tmp_path, "different token types", "wide int32")
    os.unlink(tmp_path / "parts" / "wide.idx")
    refused(tmp_path, "wide.idx missing")
    os.unlink(tmp_path / "parts" / "wide.bin")
    write_sidecar(str(tmp_path / "parts" / "part0"), info("abc"))
    write_sidecar(str(tmp_path / "parts" / "part1"), info("def"))
    refused(tmp_path, "different tokenizers", "abc", "def")
    write_sidecar(str(tmp_path / "parts" / "part1"), dataclasses.replace(info("abc"), append_eod=False))
    refused(tmp_path, "different tokenizers", "append-eod True", "append-eod False")
    shutil.rmtree(tmp_path / "parts")
    (tmp_path / "parts").mkdir()
    refused(tmp_path, "holds no .bin and .idx files")


def test_a_part_without_a_recorded_tokenizer_leaves_the_result_without(tmp_path):
    write_parts(tmp_path / "parts")
    write_sidecar(str(tmp_path / "parts" / "part0"), info("abc"))
    result = run("merge_datasets.py", "--input", tmp_path / "parts", "--output_prefix", tmp_path / "all")
    assert result.returncode == 0 and "no tokenizer is recorded" in result.stderr
    assert read_sidecar(str(tmp_path / "all")) is None and len(IndexedDataset(str(tmp_path / "all"))) == 6


def test_check_prints_documents_tokens_and_lengths(tmp_path):
    write(tmp_path / "x_text_document", [[1, 2, 900], [], [4]] + [[5] * 100] * 3)
    result = run("check_dataset.py", tmp_path / "x", "--vocab-size", 901)
    assert result.returncode == 0, result.stderr
    for text in (
        "documents  6 (1 empty), in 6 sequences",
        "tokens     304 of type uint16",
        "token ids  1 to 900",
        "64-127",
        "ok",
    ):
        assert text in result.stdout


def test_check_counts_sentences_that_bert_can_use(tmp_path):
    with IndexedDatasetBuilder(str(tmp_path / "x_text_sentence.bin"), dtype=np.uint16) as builder:
        for lengths in ([3, 5], [4], [1, 513, 1], [2, 2, 2]):
            builder.add_document(np.arange(sum(lengths)), lengths)
        builder.finalize(str(tmp_path / "x_text_sentence.idx"))
    result = run("check_dataset.py", tmp_path / "x")
    assert result.returncode == 0, result.stderr
    for text in (
        "documents  4 (0 empty), in 9 sequences",
        "sentences  2.2 per document, 59.2 tokens each",
        "pairs      from 2 documents: 1 have one sentence, 1 one of more than 512 tokens",
    ):
        assert text in result.stdout


def test_check_counts_documents_whose_sentences_are_all_empty(tmp_path):
    with IndexedDatasetBuilder(str(tmp_path / "x_text_sentence.bin"), dtype=np.uint16) as builder:
        for lengths in ([3, 5], [0, 0], [0, 4], [], [0]):
            builder.add_document(np.arange(sum(lengths)), lengths)
        builder.finalize(str(tmp_path / "x_text_sentence.idx"))
    result = run("check_dataset.py", tmp_path / "x")
    assert result.returncode == 0, result.stderr
    assert "no text    in 2 documents of empty sentences, the first is document 1: T5 rejects them" in result.stdout


def test_check_says_that_documents_of_one_sentence_give_no_pair(tmp_path):
    write(tmp_path / "x_text_sentence", [[1, 2], [3]])
    assert "pairs      from 0 documents: 2 have one sentence" in run("check_dataset.py", tmp_path / "x").stdout
    write(tmp_path / "y_text_sentence", [])
    empty = run("check_dataset.py", tmp_path / "y")
    assert empty.returncode == 1 and "pairs" not in empty.stdout and "y_text_sentence: holds no tokens" in empty.stderr


@pytest.mark.parametrize(
    "documents, dtype, place", [([[1], [2, 900]], np.uint16, "token id 900 in document 1 at token 1")]
)
def test_check_refuses_ids_outside_the_vocabulary(tmp_path, documents, dtype, place):
    write(tmp_path / "x", documents, dtype)
    result = run("check_dataset.py", tmp_path / "x", "--vocab-size", 900)
    assert result.returncode == 1 and place in result.stderr and "Traceback" not in result.stderr
    write_sidecar(str(tmp_path / "x"), info("abc"))
    assert run("check_dataset.py", tmp_path / "x").returncode == 1  # the sidecar says 300
    write(tmp_path / "y", [[], [7, 8, -3]], np.int32)
    result = run("check_dataset.py", tmp_path / "y")
    assert result.returncode == 1 and "token id -3 in document 1 at token 2 is negative" in result.stderr


def test_check_reports_every_damaged_data_set_and_goes_on(tmp_path):
    write(tmp_path / "good", [[1]])
    write(tmp_path / "bad", [[1, 2]])
    os.truncate(tmp_path / "bad.bin", 2)
    result = run("check_dataset.py", tmp_path / "missing", tmp_path / "bad", tmp_path / "good")
    assert result.returncode == 2 and "ok" in result.stdout
    assert "no data set at" in result.stderr and "bad.bin is truncated" in result.stderr
