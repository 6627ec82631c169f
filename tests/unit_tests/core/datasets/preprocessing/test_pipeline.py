"""tools/preprocess_data.py's pipeline: what comes out, whatever the form of the input and however the work is cut."""

import contextlib
import errno
import gzip
import json
import os

import numpy as np
import pytest

from megatron.core.datasets.preprocessing import inputs, pipeline, worker
from megatron.core.datasets.preprocessing.pipeline import TooManyBadLines, preprocess
from megatron.core.datasets.preprocessing.search import find_optimal_workers
from megatron.core.datasets.preprocessing.sentences import rule_spans
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sidecar import check_sidecar, read_sidecar, sidecar_path
from tests.test_utils.tiny_tokenizers import flags

BYTES = flags("ByteLevelTokenizer")
DOCUMENTS = [f"Document {number}. " + "x" * (number * 37 % 400) + "\nIt ends here." for number in range(300)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of 4 kB, so that small inputs have many."""
    monkeypatch.setattr(inputs, "MIN_PART_BYTES", 4096)
    monkeypatch.setattr(inputs, "MAX_PART_BYTES", 4096)
    monkeypatch.setattr(inputs, "READ_BYTES", 1000)


def jsonl(documents=DOCUMENTS, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in documents).encode()


def run(folder, source, name="out", tokenizer=BYTES, **values):
    """Preprocess ``source`` (bytes, or --input values) and return the totals and the prefix."""
    if isinstance(source, bytes):
        path = folder / "input.jsonl"
        path.write_bytes(source)
        source = [str(path)]
    values.setdefault("workers", 1)
    prefix = str(folder / name)
    totals = preprocess(PreprocessConfig(input=source, output_prefix=prefix, **values), tokenizer, build_tokenizer)
    return totals, prefix


def pair(prefix, key="text", level="document"):
    return [open(f"{prefix}_{key}_{level}.{suffix}", "rb").read() for suffix in ("bin", "idx")]


def texts(prefix, key="text", level="document"):
    dataset = IndexedDataset(f"{prefix}_{key}_{level}")
    return [bytes(dataset[index].astype(np.uint8)).decode() for index in range(len(dataset))]


@pytest.fixture
def reference(tmp_path):
    totals, prefix = run(tmp_path, jsonl(), "reference", append_eod=True)
    assert totals.documents == len(DOCUMENTS)
    return pair(prefix)


def test_documents_come_out_in_order_with_their_end(tmp_path):
    _, prefix = run(tmp_path, jsonl(), append_eod=True)
    dataset = IndexedDataset(prefix + "_text_document")
    assert len(dataset) == len(DOCUMENTS)
    assert dataset.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))
    for index in (0, 1, 150, 299):
        assert dataset[index].tolist() == [*DOCUMENTS[index].encode(), 256]
    assert not os.path.exists(prefix + ".partial")
    assert not os.path.exists(prefix + ".bad_lines.jsonl")


@pytest.mark.parametrize(("workers", "partitions", "sequential"), [(2, 1, False), (3, 3, True)])
def test_bytes_do_not_depend_on_workers_and_partitions(tmp_path, reference, workers, partitions, sequential):
    options = {"workers": workers, "partitions": partitions, "keep_sequential_samples": sequential}
    _, prefix = run(tmp_path, jsonl(), append_eod=True, **options)
    assert pair(prefix) == reference


@pytest.mark.parametrize("size", [500, 1 << 20])
def test_bytes_do_not_depend_on_the_cut(tmp_path, reference, monkeypatch, size):
    monkeypatch.setattr(inputs, "MIN_PART_BYTES", size)
    monkeypatch.setattr(inputs, "MAX_PART_BYTES", size)
    _, prefix = run(tmp_path, jsonl(DOCUMENTS), append_eod=True)
    assert pair(prefix) == reference


def compressed(folder, kind, halves):
    path = folder / f"input.jsonl.{kind}"
    if kind == "gz":
        path.write_bytes(b"".join(map(gzip.compress, halves)))
    else:
        zstandard = pytest.importorskip("zstandard")

        path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(half) for half in halves))
    return path


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
def test_unusable_input_is_refused(tmp_path, source, reason):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=reason):
        run(tmp_path, [str(tmp_path / source)])
    assert not os.path.exists(tmp_path / "out.partial")


def test_several_keys_make_one_pair_each(tmp_path):
    data = b"".join(json.dumps({"text": text, "title": text[:12]}).encode() + b"\n" for text in DOCUMENTS)
    _, prefix = run(tmp_path, data, json_keys=["text", "title"], workers=2)
    assert texts(prefix) == DOCUMENTS
    assert texts(prefix, "title") == [text[:12] for text in DOCUMENTS]


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
    with pytest.raises(TooManyBadLines, match="no usable document in 300 lines.*is --json-keys right"):
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


def test_an_empty_input_makes_an_empty_data_set(tmp_path):
    totals, prefix = run(tmp_path, b"")
    assert totals.documents == 0 and len(IndexedDataset(prefix + "_text_document")) == 0


def test_a_long_line_of_many_parts_is_read_once(tmp_path):
    documents = ["a" * 20_000, "b", "c" * 9_000, "d" * 4_096]
    _, prefix = run(tmp_path, jsonl(documents), workers=2)
    assert texts(prefix) == documents


def test_sentences_are_sequences(tmp_path):
    documents = ["Dr. Smith met J. Doe at 5 p.m. today! Was it 3.14? Yes.\n\nA new paragraph", "", "One."]
    totals, prefix = run(tmp_path, jsonl(documents), split_sentences=True, append_eod=True)
    dataset = IndexedDataset(prefix + "_text_sentence")
    assert dataset.document_indices.tolist() == [0, len(dataset) - 1, len(dataset)]
    assert dataset[len(dataset) - 2].tolist()[-1] == 256 and 256 not in dataset[0].tolist()
    assert totals.empty_documents == 1 and totals.documents == 2


def test_rules_split_sentences():
    text = 'Dr. Smith met J. Doe, e.g. at 5 p.m. today! "Was it 3.14?" Yes... No.\n\nA title\n\n  这是。那是！End'
    found = [text[start:stop] for start, stop in rule_spans(text)]
    assert found == [
        "Dr. Smith met J. Doe, e.g. at 5 p.m. today!",
        '"Was it 3.14?"',
        "Yes...",
        "No.",
        "A title",
        "这是。",
        "那是！",
        "End",
    ]


def test_newlines_between_sentences_can_be_kept(tmp_path):
    _, prefix = run(tmp_path, jsonl(["One is here.\nTwo is here."]), split_sentences=True, keep_newlines=True)
    assert "".join(texts(prefix, level="sentence")) == "One is here.\nTwo is here."


def test_existing_output_is_refused_unless_overwrite(tmp_path):
    _, prefix = run(tmp_path, jsonl())
    before = pair(prefix)
    with pytest.raises(ValueError, match="exists; choose another --output-prefix, or add --overwrite"):
        run(tmp_path, jsonl(DOCUMENTS[:5]))
    assert pair(prefix) == before
    run(tmp_path, jsonl(DOCUMENTS[:5]), overwrite=True)
    assert texts(prefix) == DOCUMENTS[:5]


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
    _, whole = run(tmp_path, data, "whole", json_keys=["text", "title"])
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
        assert pair(prefix, key) == pair(whole, key)


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
    with pytest.raises(RuntimeError, match="a worker process died"):
        run(tmp_path, jsonl(), workers=2)


def test_two_runs_with_one_prefix_are_refused(tmp_path):
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


def test_the_sidecar_names_the_tokenizer(tmp_path):
    _, prefix = run(tmp_path, jsonl(), append_eod=True)
    data = prefix + "_text_document"
    tokenizer = build_tokenizer(BYTES)
    info = check_sidecar(data, tokenizer)
    assert info == read_sidecar(data)
    assert (info.tokenizer_type, info.vocab_size, info.special_ids, info.append_eod) == (
        "ByteLevelTokenizer",
        257,
        {"eod": 256},
        True,
    )
    with pytest.raises(ValueError, match="made with another tokenizer: ByteLevelTokenizer with 257 ids"):
        check_sidecar(data, build_tokenizer(flags("NullTokenizer", vocab_size=257)))
    with open(sidecar_path(data), "w") as file:
        file.write('{"version": 1')
    with pytest.raises(ValueError, match="cannot be read as a tokenizer sidecar"):
        check_sidecar(data, tokenizer)
    os.unlink(sidecar_path(data))
    assert check_sidecar(data, tokenizer) is None


def test_append_eod_needs_a_tokenizer_that_has_one(tmp_path, monkeypatch):
    tokenizer = build_tokenizer(BYTES)
    tokenizer.special_ids.clear()
    cfg = PreprocessConfig(input=[__file__], output_prefix=str(tmp_path / "out"), append_eod=True)
    with pytest.raises(ValueError, match="no 'eod' token"):
        preprocess(cfg, None, lambda _: tokenizer)


def test_the_fastest_number_of_workers_is_found(tmp_path, caplog):
    (tmp_path / "in.jsonl").write_bytes(jsonl())
    cfg = PreprocessConfig(input=[str(tmp_path / "in.jsonl")], workers_to_check=[1, 2], max_documents=40)
    with caplog.at_level("INFO"):
        assert find_optimal_workers(cfg, BYTES, build_tokenizer) in (1, 2)
    assert "the fastest on 40 documents" in caplog.text
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_spawned_workers_build_their_own_tokenizer(tmp_path, reference, monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    _, prefix = run(tmp_path, jsonl(), append_eod=True, workers=2)
    assert pair(prefix) == reference


def test_a_foreign_folder_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds thesis\.txt; choose another --output-prefix"):
        run(tmp_path, jsonl(), overwrite=True)
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"


def test_a_text_that_the_tokenizer_refuses_is_located(tmp_path):
    with pytest.raises(ValueError, match=r"input\.jsonl, at or before line \d+ of the part .* reads ids separated"):
        run(tmp_path, jsonl(), tokenizer=flags("NullTokenizer", vocab_size=50))
