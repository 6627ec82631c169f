"""Files of interrupted runs (kills, full disks, errors in workers), and their continuation by the next run."""

import contextlib
import errno
import json
import os

import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.preprocessing import pipeline, worker
from megatron.core.datasets.preprocessing.pipeline import preprocess
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.tokenizers import build_tokenizer
from tests.test_utils.preprocessing import BYTES, DOCUMENTS, compressed, jsonl, pair, run, texts


@contextlib.contextmanager
def interrupted_after(monkeypatch, parts):
    """The run fails once ``parts`` parts are done."""
    with monkeypatch.context() as patch:
        original, count = worker.Worker.run, [0]

        def run_some(self, part):
            count[0] += 1
            if count[0] > parts:
                raise KeyboardInterrupt
            return original(self, part)

        patch.setattr(worker.Worker, "run", run_some)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("kind", ["plain", "gz"])
def test_an_interrupted_run_continues_to_the_same_bytes(tmp_path, reference, monkeypatch, kind):
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl())
    if kind == "gz":
        path = compressed(tmp_path, "gz", [jsonl()])
    with interrupted_after(monkeypatch, 5):
        run(tmp_path, [str(path)], append_eod=True)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("out") and name.endswith((".bin", ".idx"))]
    totals, prefix = run(tmp_path, [str(path)], append_eod=True, workers=2)
    assert totals.reused_parts == 5 and totals.documents == len(DOCUMENTS)
    assert pair(prefix) == reference


@pytest.mark.parametrize("form", ["{files}", "rewritten+{ids}"])
def test_a_rewritten_tokenizer_continues_a_run(tmp_path, monkeypatch, reference, form):
    with interrupted_after(monkeypatch, 3):
        run(tmp_path, jsonl(), append_eod=True)
    path = tmp_path / "out.partial" / "plan.json"
    plan = json.loads(path.read_text())
    files, _, ids = plan["tokenizer"].partition("+")
    path.write_text(json.dumps(plan | {"tokenizer": form.format(files=files, ids=ids)}))
    totals, prefix = run(tmp_path, [str(tmp_path / "input.jsonl")], append_eod=True)
    assert totals.reused_parts == 3 and pair(prefix) == reference


def test_parts_of_another_run_are_not_mixed_in(tmp_path, monkeypatch):
    data = jsonl()
    with interrupted_after(monkeypatch, 3):
        run(tmp_path, data, append_eod=True)
    stamp = os.stat(tmp_path / "input.jsonl").st_mtime_ns
    with pytest.raises(ValueError, match="differs in: append_eod"):
        preprocess(
            PreprocessConfig(input=[str(tmp_path / "input.jsonl")], output_prefix=str(tmp_path / "out"), workers=1),
            BYTES,
            build_tokenizer,
        )
    os.utime(tmp_path / "input.jsonl", ns=(stamp, stamp + 10**9))
    with pytest.raises(ValueError, match="differs in: inputs"):
        run(tmp_path, [str(tmp_path / "input.jsonl")], append_eod=True)
    totals, prefix = run(tmp_path, [str(tmp_path / "input.jsonl")], overwrite=True)
    assert totals.reused_parts == 0 and texts(prefix) == DOCUMENTS


def test_a_damaged_shard_is_made_again(tmp_path, reference, monkeypatch):
    with interrupted_after(monkeypatch, 6):
        run(tmp_path, jsonl(), append_eod=True)
    shards = sorted((tmp_path / "out.partial").glob("*.bin"))
    shards[0].write_bytes(shards[0].read_bytes()[:-2])
    shards[1].unlink()
    totals, prefix = run(tmp_path, [str(tmp_path / "input.jsonl")], append_eod=True)
    assert totals.reused_parts == 4 and pair(prefix) == reference


def test_an_interruption_while_publishing_is_finished_by_the_next_run(tmp_path, monkeypatch):
    data = b"".join(json.dumps({"text": text, "title": text[:9]}).encode() + b"\n" for text in DOCUMENTS)
    _, full = run(tmp_path, data, "whole", json_keys=["text", "title"])
    with monkeypatch.context() as patch:
        original = pipeline.write_sidecar

        def fail_at_second(prefix, info):
            if prefix.endswith("title_document"):
                raise KeyboardInterrupt
            original(prefix, info)

        patch.setattr(pipeline, "write_sidecar", fail_at_second)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, [str(tmp_path / "input.jsonl")], json_keys=["text", "title"])
    assert not os.path.exists(tmp_path / "out_title_document.bin")
    _, prefix = run(tmp_path, [str(tmp_path / "input.jsonl")], json_keys=["text", "title"])
    for key in ("text", "title"):
        assert pair(prefix, key) == pair(full, key)


@pytest.mark.parametrize("place", ["worker", "publishing"])
def test_a_full_disk_is_said_and_nothing_looks_complete(tmp_path, reference, monkeypatch, place):
    with monkeypatch.context() as patch:

        def full(self, *args):
            raise OSError(errno.ENOSPC, "No space left on device")

        if place == "worker":
            patch.setattr(worker.IndexedDatasetBuilder, "add_documents", full)
        else:
            patch.setattr(pipeline.IndexedDatasetBuilder, "add_index", full)
        with pytest.raises(OSError, match="the disk is full .* run the same command again"):
            run(tmp_path, jsonl(), append_eod=True)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("out") and name.endswith((".bin", ".idx"))]
    _, prefix = run(tmp_path, [str(tmp_path / "input.jsonl")], append_eod=True)
    assert pair(prefix) == reference


def test_an_error_in_a_worker_arrives_with_its_traceback(tmp_path, monkeypatch):
    def broken(self, texts):
        raise ZeroDivisionError("in the tokenizer")

    monkeypatch.setattr("megatron.core.tokenizers.simple.ByteLevelTokenizer.tokenize_batch", broken)
    with pytest.raises(ZeroDivisionError) as caught:
        run(tmp_path, jsonl(), workers=2)
    assert "_add_documents" in str(caught.value.__cause__)


def test_a_killed_worker_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.core.tokenizers.simple.ByteLevelTokenizer.tokenize_batch", lambda *_: os._exit(9))
    with pytest.raises(UserError, match="a worker process died"):
        run(tmp_path, jsonl(), workers=2)


def test_a_killed_worker_is_one_message_of_the_program(tmp_path, monkeypatch, capfd):
    from megatron.console import run_tool

    monkeypatch.setattr("megatron.core.tokenizers.simple.ByteLevelTokenizer.tokenize_batch", lambda *_: os._exit(9))
    (tmp_path / "in.jsonl").write_bytes(jsonl())
    argv = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", "2"]
    assert run_tool("preprocess", [*argv, "--tokenizer-type", "ByteLevelTokenizer"]) == 2
    [line] = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("error: a worker process died") and "--workers" in line


def test_two_runs_with_one_prefix_are_rejected(tmp_path):
    import subprocess
    import sys

    (tmp_path / "out.partial").mkdir()
    code = (
        f"import fcntl,sys; f=open({str(tmp_path / 'out.partial' / 'lock')!r},'a'); fcntl.lockf(f,fcntl.LOCK_EX);"
        "print('ready',flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ValueError, match="another run is writing"):
            run(tmp_path, jsonl())
        holder.stdin.close()  # type: ignore[union-attr]


def test_a_foreign_folder_of_that_name_is_unchanged(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds thesis\.txt; choose another --output-prefix"):
        run(tmp_path, jsonl(), overwrite=True)
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"
