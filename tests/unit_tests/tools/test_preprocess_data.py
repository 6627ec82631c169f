"""tools/preprocess_data.py and tools/train_tokenizer.py as programs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOL, TRAIN = str(ROOT / "tools" / "preprocess_data.py"), str(ROOT / "tools" / "train_tokenizer.py")
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]


def call(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """24 MB: about a second of work in 12 parts."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    line = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 40, "n": 1}) + "\n"
    path.write_text("".join(line.replace(": 1}", f": {number}}}") for number in range(13_000)), encoding="utf-8")
    return path


def pair(prefix):
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def test_the_published_command_works_with_both_spellings(tmp_path):
    corpus = tmp_path / "data.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"line {n} of text"}) + "\n" for n in range(50)), encoding="utf-8")
    finished = call(TRAIN, "--input", corpus, "--vocab_size", 300, "--output", tmp_path / "tok")
    assert finished.returncode == 0, finished.stderr
    finished = call(
        TOOL,
        "--input",
        corpus,
        "--output_prefix",
        tmp_path / "a",
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        tmp_path / "tok",
        "--workers",
        2,
        "--append-eod",
        "--dataset-impl",
        "mmap",
    )
    assert finished.returncode == 0, finished.stderr
    assert "50 documents" in finished.stdout and (tmp_path / "a_text_document.tokenizer.json").exists()
    finished = call(TOOL, "--input", corpus, "--output-prefix", tmp_path / "a", *BYTES)
    assert finished.returncode == 2 and "--overwrite" in finished.stderr


def test_training_a_tokenizer_is_deterministic(tmp_path):
    corpus = tmp_path / "data.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"some words {n * n} of text"}) + "\n" for n in range(500)))
    for name in ("one", "two"):
        assert (
            call(
                TRAIN, "--input", corpus, "--vocab-size", 400, "--output", tmp_path / name, "--max-bytes", 5000
            ).returncode
            == 0
        )
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()
    assert "at least 257" in call(TRAIN, "--input", corpus, "--vocab-size", 20, "--output", tmp_path / "three").stderr


def test_wrong_flags_are_named_all_at_once():
    finished = call(TOOL, "--json-key", "x", "--workers", "0", "--tokenizer-type", "Nope")
    assert finished.returncode == 2
    for part in ("--json-key: unknown flag", "--workers", "--input", "--output-prefix", "--tokenizer-type"):
        assert part in finished.stderr
    assert "Traceback" not in finished.stderr


def test_help_needs_no_torch():
    finished = call("-X", "importtime", TOOL, "--help")
    assert (
        finished.returncode == 0
        and "--keep-sequential-samples" in finished.stdout
        and "--tiktoken-pattern" in finished.stdout
    )
    assert " torch" not in finished.stderr


def test_bad_lines_decide_the_exit_status(tmp_path):
    corpus = tmp_path / "data.jsonl"
    corpus.write_bytes(b'{"text": "a"}\nnonsense\n')
    arguments = [TOOL, "--input", corpus, "--output-prefix", tmp_path / "out", *BYTES]
    strict = call(*arguments, "--strict")
    assert strict.returncode == 2 and "line 2: malformed JSON" in strict.stderr and "Traceback" not in strict.stderr
    loose = call(*arguments)
    assert loose.returncode == 0 and "1 unusable lines were skipped" in loose.stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_run_again_gives_the_bytes_of_an_uninterrupted_run(tmp_path, corpus, workers):
    arguments = [sys.executable, TOOL, "--input", str(corpus), "--append-eod", *BYTES, "--workers", str(workers)]
    full = subprocess.run([*arguments, "--output-prefix", str(tmp_path / "whole")], capture_output=True, text=True)
    assert full.returncode == 0, full.stderr
    repeated = [*arguments, "--output-prefix", str(tmp_path / "out")]
    kills = 0
    while kills < 4:
        process = subprocess.Popen(repeated, stdout=subprocess.DEVNULL, start_new_session=True)
        before = finished_parts(tmp_path)
        while process.poll() is None and finished_parts(tmp_path) < before + 2:
            time.sleep(0.002)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)  # the parent alone: its workers must follow by themselves
        process.wait()
        kills += 1
        assert not (tmp_path / "out_text_document.idx").exists()
    assert kills >= 1
    last = subprocess.run(repeated, capture_output=True, text=True)
    assert last.returncode == 0 or "exists" in last.stderr, last.stderr
    assert pair(tmp_path / "out") == pair(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def finished_parts(folder):
    partial = folder / "out.partial"
    try:
        return sum(name[:1].isdigit() and name.endswith(".json") for name in os.listdir(partial))
    except FileNotFoundError:
        return 0
