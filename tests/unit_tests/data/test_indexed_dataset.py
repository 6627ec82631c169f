"""Reading and writing .bin/.idx pairs: Megatron-LM's bytes, bounded memory, no half-finished results."""

import errno
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import indexed_writer
from megatron.data.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedDatasetError,
    MissingDatasetError,
    get_bin_path,
    get_idx_path,
    resolve_prefix,
)

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [[5, 6, 7], [], [8], [65499, 0, 1, 2]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document, dtype=dtype), [len(document)])
    builder.finalize(get_idx_path(str(prefix)))
    return str(prefix)


def test_bytes_are_the_published_layout(tmp_path):
    """Assembled by hand from the layout of docs/reference/data_format.md."""
    prefix = write(tmp_path / "data")
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected += struct.pack("<4i", 3, 0, 1, 4) + struct.pack("<4q", 0, 6, 6, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert Path(prefix + ".idx").read_bytes() == expected
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<8H", 5, 6, 7, 8, 65499, 0, 1, 2)
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_a_pair_assembled_by_hand_is_read(tmp_path):
    """int32, two sequences in the first document, and modes: what other writers produce."""
    prefix = str(tmp_path / "hand")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    index += struct.pack("<3i", 1, 2, 1) + struct.pack("<3q", 0, 4, 12) + struct.pack("<3q", 0, 2, 3)
    Path(prefix + ".idx").write_bytes(index + struct.pack("<3b", 0, 1, 0))
    Path(prefix + ".bin").write_bytes(struct.pack("<4i", 9, 10, 11, 12))
    data = IndexedDataset(prefix, multimodal=True)
    assert [tokens.tolist() for tokens in data[:][0]] == [[9], [10, 11], [12]]
    assert data[1][0].tolist() == [10, 11] and data[1][1] == 1
    assert data.sequence_modes.tolist() == [0, 1, 0] and data.document_indices.tolist() == [0, 2, 3]
    with pytest.raises(IndexedDatasetError, match="multimodal=True"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("mmap", [True, False])
def test_documents_come_back(tmp_path, mmap):
    data = IndexedDataset(write(tmp_path / "data"), mmap=mmap)
    assert len(data) == 4 and data.index.dtype is np.uint16
    assert [data[i].tolist() for i in range(4)] == DOCUMENTS
    assert [tokens.tolist() for tokens in data[1:4]] == DOCUMENTS[1:]
    assert data[2:2] == [] and data[-1].tolist() == DOCUMENTS[-1]
    assert data.get(3, offset=1, length=2).tolist() == [0, 1]
    assert data.get(3, offset=4).tolist() == []
    assert data.sequence_lengths.tolist() == [3, 0, 1, 4]
    out = np.zeros(6, dtype=np.int64)
    assert data.gather(np.array([0, 1, 2, 3]), 1, out) == 6
    assert out.tolist() == [6, 7, 8, 65499, 0, 1]
    assert data.gather(np.array([2]), 0, out) == 1
    for bad in (lambda: data.get(4), lambda: data.get(0, 2, 5), lambda: data.get(0, -1), lambda: data[7]):
        with pytest.raises(IndexError):
            bad()
    with pytest.raises(ValueError, match="step 1"):
        data[::2]
    with pytest.raises(TypeError):
        data["0"]


def test_an_empty_data_set_is_written_and_read(tmp_path):
    data = IndexedDataset(write(tmp_path / "none", []))
    assert len(data) == 0 and data[:] == [] and data.document_indices.tolist() == [0]


documents = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), min_size=1, max_size=3), max_size=8)


@settings(max_examples=60, deadline=None)
@given(documents, st.sampled_from([np.uint16, np.int32, np.int64]))
def test_every_way_of_writing_gives_the_same_bytes(tmp_path_factory, content, dtype):
    """add_document, add_item with end_document, merging single-document data sets."""
    folder = tmp_path_factory.mktemp("ways")
    names = ["a", "b", "c"]
    builders = {name: IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype) for name in names}
    for number, sequences in enumerate(content):
        tokens = [token for sequence in sequences for token in sequence]
        builders["a"].add_document(tokens, [len(sequence) for sequence in sequences])
        for sequence in sequences:
            builders["b"].add_item(np.array(sequence, dtype=np.int64))
        builders["b"].end_document()
        with IndexedDatasetBuilder(str(folder / f"part{number}.bin"), dtype) as part:
            part.add_document(np.array(tokens, dtype=dtype), [len(sequence) for sequence in sequences])
            part.finalize(str(folder / f"part{number}.idx"))
        builders["c"].add_index(str(folder / f"part{number}"))
    for name in names:
        builders[name].finalize(str(folder / f"{name}.idx"))
    for suffix in (".bin", ".idx"):
        assert len({(folder / (name + suffix)).read_bytes() for name in names}) == 1
    data = IndexedDataset(str(folder / "a"))
    assert [tokens.tolist() for tokens in data[:]] == [sequence for document in content for sequence in document]


def test_many_documents_at_once_equal_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_writer, "SPOOL_ITEMS", 3)  # several spills
    write(tmp_path / "single")
    with IndexedDatasetBuilder(str(tmp_path / "bulk.bin"), np.uint16) as builder:
        builder.add_documents(np.concatenate([np.array(d, dtype=np.uint16) for d in DOCUMENTS]), [3, 0, 1, 4])
        builder.finalize(str(tmp_path / "bulk.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"single{suffix}").read_bytes() == (tmp_path / f"bulk{suffix}").read_bytes()


def test_torch_tensors_can_be_added(tmp_path):
    torch = pytest.importorskip("torch")
    with IndexedDatasetBuilder(str(tmp_path / "t.bin"), np.int32) as builder:
        builder.add_item(torch.tensor([1, 2]))
        builder.end_document()
        builder.add_document(torch.tensor([3]), [1])
        builder.finalize(str(tmp_path / "t.idx"))
    assert [tokens.tolist() for tokens in IndexedDataset(str(tmp_path / "t"))[:]] == [[1, 2], [3]]


@pytest.mark.parametrize("token", [65536, -1, 10**12])
def test_a_token_that_does_not_fit_is_rejected(tmp_path, token):
    with IndexedDatasetBuilder(str(tmp_path / "x.bin"), np.uint16) as builder:
        with pytest.raises(ValueError, match=f"token id {token} does not fit uint16"):
            builder.add_document(np.array([3, token]), [2])
        with pytest.raises(ValueError, match="sum to 3"):
            builder.add_document([1, 2], [3])
    assert os.listdir(tmp_path) == []


def test_writing_ten_million_documents_stays_small(tmp_path):
    """Peak memory of a process that writes 10 M documents, over what it takes to import; bulk calls keep it quick."""
    program = """
import resource, sys, numpy as np
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with IndexedDatasetBuilder(sys.argv[1] + ".bin", np.uint16) as builder:
    tokens, lengths = np.zeros(100_000, dtype=np.uint16), np.ones(100_000, dtype=np.int32)
    for _ in range(100):
        builder.add_documents(tokens, lengths)
    for _ in range(10_000):
        builder.add_document(tokens[:1], [1])
    builder.finalize(sys.argv[1] + ".idx")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, len(IndexedDataset(sys.argv[1])))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "many")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    mebibytes, count = map(int, result.stdout.split())
    assert count == 10_010_000
    assert mebibytes < 64


def test_nothing_is_left_when_writing_is_given_up(tmp_path):
    write(tmp_path / "kept")
    before = (tmp_path / "kept.idx").read_bytes()
    with pytest.raises(RuntimeError, match="stop"), IndexedDatasetBuilder(str(tmp_path / "kept.bin")) as builder:
        builder.add_document([1], [1])
        raise RuntimeError("stop")
    builder = IndexedDatasetBuilder(str(tmp_path / "dropped.bin"))
    del builder
    gc.collect()
    assert sorted(os.listdir(tmp_path)) == ["kept.bin", "kept.idx"]
    assert (tmp_path / "kept.idx").read_bytes() == before


def test_a_finished_builder_refuses_more(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"))
    builder.finalize(str(tmp_path / "x.idx"))
    with pytest.raises(ValueError, match="already finished"):
        builder.finalize(str(tmp_path / "x.idx"))


def test_a_killed_writer_leaves_nothing_that_looks_complete(tmp_path):
    program = (
        "import os, signal, sys, numpy as np; from megatron.data.indexed_dataset import IndexedDatasetBuilder;"
        "b = IndexedDatasetBuilder(sys.argv[1] + '.bin'); b.add_documents(np.zeros(10**6, dtype=np.int32), [10**6]);"
        "b.data_file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path / "x")], cwd=ROOT, check=False)
    assert result.returncode == -signal.SIGKILL
    assert not IndexedDataset.exists(str(tmp_path / "x"))
    assert not list(tmp_path.glob("*.bin")) and not list(tmp_path.glob("*.idx"))


def test_a_full_disk_is_reported_and_cleaned_up(tmp_path):
    """A file size limit simulates the full disk: the write fails the same way, with another errno."""
    program = """
import resource, sys, numpy as np
from megatron.data.indexed_dataset import IndexedDatasetBuilder
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
builder = IndexedDatasetBuilder(sys.argv[1] + ".bin")
try:
    for _ in range(100):
        builder.add_documents(np.zeros(10**5, dtype=np.int32), [10**5])
    builder.finalize(sys.argv[1] + ".idx")
except OSError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "x")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "cannot write" in result.stdout and "x.bin" in result.stdout
    assert os.listdir(tmp_path) == [], result.stdout


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_the_end_keeps_no_pair(tmp_path, monkeypatch, call):
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"))
    builder.add_document([1], [1])

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(indexed_writer.os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        builder.finalize(str(tmp_path / "x.idx"))
    assert os.listdir(tmp_path) == []


def test_arrays_outlive_their_data_set(tmp_path):
    data = IndexedDataset(write(tmp_path / "data"))
    arrays, lengths = data[:], data.sequence_lengths
    del data
    gc.collect()
    for name in os.listdir(tmp_path):
        os.unlink(tmp_path / name)
    assert [tokens.tolist() for tokens in arrays] == DOCUMENTS and lengths.tolist() == [3, 0, 1, 4]


def test_opening_again_and_again_keeps_descriptors_and_memory_flat(tmp_path):
    prefix = write(tmp_path / "data")
    for mmap in (True, False):
        IndexedDataset(prefix, mmap=mmap)
    before, memory = len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_ in range(2000):
        IndexedDataset(prefix, mmap=bool(round_ % 2)).get(0)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 16 * 1024


def read_all(data):
    return [tokens.tolist() for tokens in data[:]]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("mmap", [True, False])
def test_worker_processes_read_the_same(tmp_path, method, mmap):
    data = IndexedDataset(write(tmp_path / "data"), mmap=mmap)
    assert read_all(pickle.loads(pickle.dumps(data))) == DOCUMENTS
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(read_all, (data,)) == DOCUMENTS
    assert read_all(data) == DOCUMENTS


@pytest.mark.parametrize("mmap", [True, False])
def test_offsets_beyond_four_gigabytes(tmp_path, mmap):
    """A sparse .bin of 2^33 bytes: only its last tokens exist on disk."""
    prefix, count, length = str(tmp_path / "sparse"), 5, 2**31 - 1
    lengths = np.full(count, length, dtype=np.int64)
    total = int(lengths.sum()) * 2
    pointers = np.concatenate(([0], np.cumsum(lengths)[:-1])) * 2
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    body = (
        lengths.astype("<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(count + 1).astype("<i8").tobytes()
    )
    Path(prefix + ".idx").write_bytes(header + body)
    with open(prefix + ".bin", "wb") as stream:
        stream.seek(total - 4)
        stream.write(struct.pack("<2H", 41, 42))
    assert total > 2**34
    data = IndexedDataset(prefix, mmap=mmap)
    assert data.get(4, offset=length - 3).tolist() == [0, 41, 42]
    out = np.zeros(3, dtype=np.int64)
    assert data.gather(np.array([4]), length - 2, out) == 2 and out[:2].tolist() == [41, 42]


def test_a_file_that_shrinks_after_opening_is_noticed_without_mmap(tmp_path):
    prefix = write(tmp_path / "data")
    data = IndexedDataset(prefix, mmap=False)
    os.truncate(prefix + ".bin", 4)
    with pytest.raises(IndexedDatasetError, match="shrank"):
        data[3]


def test_the_document_suffix_is_tried(tmp_path):
    bare = str(tmp_path / "corpus")
    write(bare + "_text_document")
    assert resolve_prefix(bare) == bare + "_text_document"
    assert resolve_prefix(bare + "_text_document") == bare + "_text_document"
    with pytest.raises(FileNotFoundError, match="corpus_text_document"):
        resolve_prefix(str(tmp_path / "corpus_txt_document"))
    with pytest.raises(FileNotFoundError, match=r"corpus\.idx does not exist"):
        IndexedDataset(bare)
    assert IndexedDataset.exists(bare + "_text_document") and not IndexedDataset.exists(bare)


def test_dtype_codes_and_choice():
    codes = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
    for code, name in codes.items():
        dtype = DType.dtype_from_code(code)
        assert np.dtype(dtype).name == name and DType.code_from_dtype(dtype) == code
        assert DType.size(code) == DType.size(dtype) == np.dtype(name).itemsize
    assert DType.optimal_dtype(65499) is np.uint16 and DType.optimal_dtype(65500) is np.int32
    assert DType.optimal_dtype(None) is np.int32


def test_the_import_path_that_programs_know():
    from megatron.core.datasets import indexed_dataset

    assert indexed_dataset.IndexedDataset is IndexedDataset
    assert indexed_dataset.IndexedDatasetBuilder is IndexedDatasetBuilder


@pytest.mark.parametrize("has, lacks", [(".bin", ".idx"), (".idx", ".bin")])
@pytest.mark.parametrize("typed", ["", ".bin", ".idx"])
def test_half_of_a_pair_names_the_missing_file(tmp_path, has, lacks, typed):
    (tmp_path / f"x{has}").write_bytes(b"")
    with pytest.raises(MissingDatasetError, match=f"x{has} exists, .*x{lacks} is missing; copy both files"):
        resolve_prefix(str(tmp_path / f"x{typed}"))
