"""Files of torch.save: only tensors and plain data are read, no function of a file is called, damage is found."""

import argparse
import collections
import io
import os
import pickle
import random
import struct
import time
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.export import torch_file
from megatron.export.torch_file import read_torch_file
from megatron.export.unpickler import Record, unpickle

CALLED = []


def load(data):
    return unpickle(io.BytesIO(data), len(data), "file")


def call(*args):
    CALLED.append(args)


class Calls:
    """Pickles as a call of ``function(*args)``."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


class SetsState:
    def __setstate__(self, state):
        call("state")

    def __getstate__(self):
        return {"a": 1}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Calls(os.system, "touch crafted"), "system"),
        (Calls(eval, "call()"), "eval"),
        (Calls(exec, "call()"), "exec"),
        (Calls(__import__, "os"), "__import__"),
        ([{"a": Calls(os.popen, "touch crafted")}], "popen"),
        (Calls(torch.load, "crafted"), "torch.serialization.load"),
        (Calls(torch.hub.load, "a", "b"), "torch.hub"),
        (Calls(np.fromfile, "crafted"), "numpy"),
        (Calls(pickle.loads, b"x"), "pickle"),
        (Calls(map, call, [1]), "map"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_that_calls_is_rejected_by_name(value, named, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=named):
        load(pickle.dumps(value, protocol))
    assert not os.listdir(tmp_path) and not CALLED


def test_classes_of_other_programs_are_records_and_run_nothing():
    value = load(pickle.dumps({"a": SetsState(), "b": Calls(call, 1)}))
    assert isinstance(value["a"], Record) and value["a"].kind.endswith("SetsState") and value["a"]["a"] == 1
    assert isinstance(value["b"], Record) and value["b"].args == (1,)
    assert not CALLED


def attribute(owner, name):
    """A pickle of ``getattr(owner, name)``, for the opcodes of ``owner``."""
    return b"cbuiltins\ngetattr\n" + owner + b"X" + struct.pack("<I", len(name)) + name + b"\x86R"


def test_enum_members_as_python_3_11_0_to_3_11_3_pickle_them_are_records():
    member = load(b"\x80\x02" + attribute(b"cother.module\nColor\n", b"RED") + b".")
    assert isinstance(member, Record) and (member.kind, member.args) == ("other.module.Color", ("RED",))
    number = load(b"\x80\x02csignal\nSIGTERM\n.")
    assert isinstance(number, Record) and (number.kind, number.args) == ("signal.Signals", (15,))


@pytest.mark.parametrize(
    "data",
    [
        attribute(b"X\x04\x00\x00\x00text", b"upper"),
        b"cbuiltins\ngetattr\ncother\nColor\nK\x01\x86R",
        attribute(b"cos\nsystem\n", b"__call__"),
        attribute(b"cother\nColor\n", b"run") + b"K\x01\x85R",  # a call of the attribute
        b"csignal\nraise_signal\nK\x09\x85R",
    ],
)
def test_other_attributes_are_rejected(data):
    with pytest.raises(CheckpointError, match="attribute|requests|call"):
        load(b"\x80\x02" + data + b".")


def test_pickle_with_nested_reduce_is_rejected():
    with pytest.raises(CheckpointError):
        load(b"\x80\x02cmegatron\nA\n)R)R.")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80\x04", b"\x80\x04X\xff\xff\xff\x7fabc", b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x8b\xff\xff\xff\x7f1.", b"\x80\x02r\xff\xff\xff\xff.", b"\x80\x02N(ios\nsystem\n.",
        b"\x80\x02\x82\x01.", b"(S'a'\nios\nsystem\n.", b"\x80\x05\x97.", b"not a pickle",
    ],
)  # fmt: skip
def test_truncated_and_strange_pickles_end_in_one_message(data):
    with pytest.raises(CheckpointError, match="file: "):
        load(data)


P = b"\x80\x05"
STR, LIST, TUPLE = b"cbuiltins\nstr\n", b"cbuiltins\nlist\n", b"cbuiltins\ntuple\n"
ORDERED = b"ccollections\nOrderedDict\n"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"


def text(length):
    return b"X" + struct.pack("<I", length) + b"a" * length


def doubled(item, times):
    """``item`` in tuples (x, x) of tuples, sharing all parts: 2^times of it for a printer or a hash."""
    return item + b"q\x000" + b"h\x00h\x00\x86q\x000" * times + b"h\0"


def lists_of_lists(times):
    return b"]q\0" + b"0]q\x01h\0ah\0a0h\x01q\x00" * times


# name -> a small pickle that asks for much
CRAFTED = {
    "bytearray of 20 GB": P + b"\x96" + struct.pack("<Q", 20 << 30) + b".",
    "bytes of 20 GB": P + b"\x8e" + struct.pack("<Q", 20 << 30) + b".",
    "text of 20 GB": P + b"\x8d" + struct.pack("<Q", 20 << 30) + b".",
    "bytes beyond every size": P + b"\x96" + b"\xff" * 8 + b".",
    "frame of 20 GB": P + b"\x95" + struct.pack("<Q", 20 << 30) + b"N",
    "nested frames": P + b"\x95\xff\xff\xff\xff\0\0\0\0" * 2000 + b"N.",
    "integer of 2 GB": P + b"\x8b\xff\xff\xff\x7f1.",
    "integer of 100 kB": P + b"\x8b" + struct.pack("<i", 10**5) + b"\x01" * 10**5 + b".",
    "integer as text": P + b"I" + b"9" * 10**6 + b"\n.",
    "long integer as text": P + b"L" + b"9" * 10**6 + b"L\n.",
    "index of a memo": P + b"Nr\xff\xff\xff\xffh\0.",
    "lists of one text": P + text(10**5) + b"q\0" + (LIST + b"h\0\x85R") * 2000 + b".",
    "tuples of one text": P + text(10**5) + b"q\0" + (TUPLE + b"h\0\x85R") * 2000 + b".",
    "lists of one list": P + b"(" + b"K\x00" * 10**4 + b"lq\x00" + (LIST + b"h\x00\x85R") * 5000 + b".",
    "calls with one long list of arguments":
        P + b"(" + b"K\0" * 10**4 + b"tq\0" + b"cmegatron\nA\nq\x01" + b"h\x01h\0R0" * 5000 + b"N.",
    "states from one long dictionary":
        P + b"(" + b"".join(b"X\x05\0\0\0%05dN" % i for i in range(10**4)) + b"dq\x000cmegatron\nA\n)R"
        + b"h\0b" * 5000 + b".",
    "dictionaries of one long list":
        P + b"(" + b"X\x01\0\0\0aN\x86" * 10**4 + b"lq\0" + (ORDERED + b"h\0\x85R") * 5000 + b".",
    "encoded texts": P + text(10**5) + b"q\x000" + b"c_codecs\nencode\nq\x010" + b"h\x01h\0\x85R0" * 5000 + b"N.",
    "tuples 40 deep": P + doubled(b"N", 40) + b".",
    "tuples 40 deep as a key": P + b"}" + doubled(b"K\x01", 40) + b"Ns.",
    "tuples 40 deep as a shape": P + TENSOR + b"(" + STORAGE + b"K\x00" + doubled(b"N", 40) + b")tR.",
    "tuples 40 deep as text to encode": P + b"c_codecs\nencode\n" + doubled(b"N", 40) + b"\x85R.",
    "tuples 40 deep as a persistent id": P + doubled(b"N", 40) + b"Q.",
    "lists 40 deep": P + lists_of_lists(40) + b".",
    "lists 40 deep in a record": P + b"cmegatron\nA\n)R}X\x01\0\0\0a" + lists_of_lists(40) + b"sb.",
    "a list in itself": P + b"]q\0h\0a.",
    "a dictionary in itself": P + b"}q\0X\x01\0\0\0ah\0s.",
    "a record in itself": P + b"cmegatron\nA\n)Rq\0}X\x01\0\0\0ah\0sb.",
    "keys of 1500^3 items":
        P + b"}(" + b"K\x01" * 1500 + b"tq\x000(" + b"h\0" * 1500 + b"tq\x010(" + b"h\x01" * 1500 + b"tNs.",
    "keys with one long tuple":
        P + b"(" + b"K\x01" * 10**4 + b"tq\x000}" + b"h\0Ns" * 5000 + b".",
    "integers of equal hashes":
        P + b"}" + b"".join(b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"Ns" for k in range(30000))
        + b".",
    "tuples for keys": P + b"}" + b"".join(b"M" + struct.pack("<H", k) + b"\x85Ns" for k in range(30000)) + b".",
    "a key nested deeper than the stack": P + b"})" + b"\x85" * 10**5 + b"Ns.",
    "a pair nested deeper than the stack": P + ORDERED + b"(](](" + b")" + b"\x85" * 10**5 + b"Neeq\0\x85R.",
    "a list nested deeper than the stack": P + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
    "marks": P + b"(" * 10**5 + b"N.",
    "a tensor of 2^60 elements": P + TENSOR + b"(" + STORAGE + b"K\0\x8a\x08" + b"\0" * 7 + b"\x10\x85K\0\x85tR.",
    "a tensor of 10^6 dims": P + TENSOR + b"(" + STORAGE + b"K\0(" + b"K\x01" * 10**6 + b"tq\0h\0tR.",
    "a tensor with a text for its shape": P + TENSOR + b"(" + STORAGE + b"K\0" + text(10) + text(10) + b"tR.",
    "a tensor with strides of text": P + TENSOR + b"(" + STORAGE + b"K\0K\x01\x85" + text(1) + b"\x85tR.",
    "a tensor of another type from 10^5 arguments":
        P + b"ctorch._tensor\n_rebuild_from_type_v2\n(NN(" + b"K\0" * 10**5 + b"tNtR.",
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_pickle_costs_little_and_ends_in_one_short_message(name, tmp_path):
    data = CRAFTED[name]
    path = tmp_path / "crafted.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(CheckpointError, match="crafted.pt: ") as error:
        print(repr(read_torch_file(path)))
    seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # without a limit on the work, cases take minutes; with it, at most 3 s on a slow machine
    assert seconds < 20 and peak < 30 * len(data) + 2**24
    assert len(str(error.value)) < 400 + len(str(path)) and len(str(error.value).splitlines()) == 1


def test_structures_that_share_parts_within_reason_are_read():
    size = (3, 4)
    value = {f"layer {i}": {"size": size, "names": ["a", size], "of": (0, i)} for i in range(500)}
    assert load(pickle.dumps(value, 5)) == value
    value = {(0, i): {i: 1.5, "a" * 100: b"b"} for i in range(500)}
    assert load(pickle.dumps(value, 2)) == value
    value = [set(range(50)), frozenset("ab"), bytearray(b"cd"), collections.OrderedDict(a=1)]
    assert load(pickle.dumps(value, 2))[2:] == [b"cd", {"a": 1}]


def records_of(path):
    """Name -> (position of its bytes in the file, bytes) of a zip file."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name, extra = struct.unpack("<HH", data[entry.header_offset + 26 : entry.header_offset + 30])
            yield entry.filename, (entry.header_offset + 30 + name + extra, entry.file_size)


def rewrite(path, change, **options):
    """Write the records of a file of torch.save again: name -> new (name, bytes), or None to remove it."""
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", **options) as archive:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data in records.items():
            for new in change(name, data):
                archive.writestr(*new)


REWRITTEN = {
    # name -> (change of the records, options of the zip file, words of the message)
    "deflated": (lambda name, data: [(name, data)], {"compression": zipfile.ZIP_DEFLATED}, "compressed"),
    "lzma": (lambda name, data: [(name, data)], {"compression": zipfile.ZIP_LZMA}, "compressed"),
    "bzip2": (lambda name, data: [(name, data)], {"compression": zipfile.ZIP_BZIP2}, "compressed"),
    "data.pkl twice": (lambda name, data: [(name, data)] * (1 + ("data.pkl" in name)), {}, "there twice"),
    "without data.pkl": (lambda name, data: [] if "data.pkl" in name else [(name, data)], {}, "no data.pkl"),
    "two data.pkl": (lambda name, data: [(name, data), (f"b/{name}", data)], {}, "no data.pkl"),
    "without the record": (lambda name, data: [] if name.endswith("data/0") else [(name, data)], {}, "is not there"),
    "short record": (
        lambda name, data: [(name, data[:-4] if name.endswith("data/0") else data)], {}, "is not there"
    ),
    "other byte order": (
        lambda name, data: [(name, b"bigbig" if "byteorder" in name else data)], {}, "another byte order"
    ),
    "byte order of 10 MB": (
        lambda name, data: [(name, data * 2**21 if "byteorder" in name else data)], {}, "another byte order"
    ),
    "pickle of 10 MB of zeros": (
        lambda name, data: [(name, bytes(10**7) if "data.pkl" in name else data)], {}, "not a complete pickle"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITTEN)
def test_records_must_be_stored_once_and_of_their_size(name, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(8)}, path)
    change, options, words = REWRITTEN[name]
    rewrite(path, change, **options)
    with pytest.raises(CheckpointError, match=f"a.pt: .*{words}") as error:
        read_torch_file(path)["a"].read()
    assert "\n" not in str(error.value)


def test_an_inflated_pickle_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", P + b"N0" * 10**7 + b"N.")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="compressed"):
        read_torch_file(tmp_path / "a.pt")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("rows", [False, True])
def test_every_flipped_bit_of_a_record_is_found(tmp_path, rows):
    path = tmp_path / "a.pt"
    values = torch.randn(3 * 2**20 + 5)  # more than two chunks
    torch.save({"a": values, "b": values[100:200].view(20, 5), "c": torch.arange(7)}, path)
    full = path.read_bytes()
    places = dict(records_of(path))
    generator = random.Random(0)
    for number, name in enumerate(["a/data/0", "a/data/1", "a/data.pkl", "a/byteorder"] * 5):
        start, size = places[name]
        byte = start + (size - 1 if number < 4 else generator.randrange(size))
        path.write_bytes(full[:byte] + bytes([full[byte] ^ 1 << number % 8]) + full[byte + 1 :])
        with pytest.raises(CheckpointError, match=f"a.pt: damaged: its record {name} "):
            for tensor in read_torch_file(path).values():
                _ = tensor.rows(1, 3) if rows else tensor.read()
    path.write_bytes(full)
    read = read_torch_file(path)
    assert torch.equal(read["b"].rows(1, 3), values[105:115].view(2, 5)), "a part of a record, read first"
    assert torch.equal(read["a"].read(), values) and torch.equal(read["b"].read(), values[100:200].view(20, 5))


def test_a_record_is_read_once_for_its_checksum(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    values = torch.randn(2**21 + 1)
    torch.save([values[i::4] for i in range(4)], path)
    read, sizes = read_torch_file(path), []
    real = torch_file._Range.read_into
    monkeypatch.setattr(
        torch_file._Range, "read_into", lambda self, view, at: [sizes.append(len(view)), real(self, view, at)][0]
    )
    assert torch.equal(read[0].read(), values[::4])
    assert sum(sizes) == 30 + values.nbytes
    sizes.clear()
    assert torch.equal(read[3].rows(5, 9), values[3::4][5:9])
    assert sum(sizes) == 30 + 4 * 13, "from its first element to its last: the record is known to be whole"


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_torch_file(tmp_path / "a.pt")["a"].read(), torch.ones(3))


def test_tensors_are_read_lazily_and_equal(tmp_path):
    full = torch.arange(60.0).view(3, 4, 5)
    saved = {
        "whole": full, "view": full[1:, :, ::2], "turned": full.transpose(0, 2), "bf16": full.bfloat16(),
        "scalar": torch.tensor(3), "empty": torch.empty(0, 3, dtype=torch.int32),
        "parameter": torch.nn.Parameter(full[0]),
        "nested": collections.OrderedDict(a=[(torch.ones(2, dtype=torch.int64), "text")]),
        "args": argparse.Namespace(lr=1.0, names=["a"]), "double": np.float64(2.5), "bytes": io.BytesIO(b"abc"),
        "random": np.random.get_state(), "dtype": torch.float16, "size": torch.Size([1, 2]),
    }  # fmt: skip
    torch.save(saved, tmp_path / "a.pt")
    read = read_torch_file(tmp_path / "a.pt")
    for name in ("whole", "view", "turned", "bf16", "scalar", "empty", "parameter"):
        assert torch.equal(read[name].read(), saved[name].detach())
        assert read[name].dtype == read[name].read().dtype == saved[name].dtype
    assert torch.equal(read["nested"]["a"][0][0].read(), torch.ones(2, dtype=torch.int64))
    assert read["args"]["lr"] == 1.0 and read["double"] == 2.5 and read["bytes"]["state"][0] == b"abc"
    assert read["dtype"] is torch.float16 and list(read["size"]) == [1, 2]
    data = b"x" * 7 + (tmp_path / "a.pt").read_bytes() + b"rest"
    (tmp_path / "b").write_bytes(data)
    inside = read_torch_file(tmp_path / "b", 7, len(data) - 11)
    assert torch.equal(inside["view"].read(), saved["view"])


def test_damaged_files_end_in_one_message(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(100)}, path)
    full = path.read_bytes()
    with pytest.raises(CheckpointError, match="is missing"):
        read_torch_file(tmp_path / "b.pt")
    for data in (full[: len(full) // 2], full[:-30], full[40:], b"", b"old format", b"PK\x03\x04"):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="a.pt: ") as error:
            read_torch_file(path)
        assert "\n" not in str(error.value)


def test_files_of_torch_before_1_6_are_read(tmp_path):
    path = tmp_path / "a.bin"
    values = torch.arange(24.0)
    saved = {
        "a": values.view(4, 6), "b": torch.nn.Parameter(values.view(6, 4).t()), "c": torch.ones(3).bfloat16(),
        "d": torch.ones(2, dtype=torch.uint16), "e": torch.tensor(True), "n": 5,
    }  # fmt: skip
    torch.save(saved, path, _use_new_zipfile_serialization=False)
    read = read_torch_file(path)
    for name in "abcde":
        assert torch.equal(read[name].read(), saved[name].detach()) and read[name].dtype == saved[name].dtype
    assert read["n"] == 5 and torch.equal(read["b"].rows(1, 3), saved["b"].detach()[1:3])
    full = path.read_bytes()
    for cut in (1, 30, 60, len(full) // 2, len(full) - 3):
        path.write_bytes(full[:-cut])
        with pytest.raises(CheckpointError, match="a.bin: "):
            read_torch_file(path)
    for old, new in ((b"little_endian", b"little_endiam"), (b"FloatStorage", b"OtherStorage"), (b"P\x19", b"Q\x19"),
                     (b"_rebuild_parameter", b"_rebuild_parametes")):  # fmt: skip
        path.write_bytes(full.replace(old, new, 1))
        with pytest.raises(CheckpointError, match="a.bin: "):
            read_torch_file(path)


def test_a_tensor_larger_than_its_storage_is_rejected(tmp_path):
    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"K\x04\x85", b"K\x05\x85") if name.endswith("data.pkl") else data)
    with pytest.raises(CheckpointError, match=r"a tensor of shape \[5\] needs 5 elements, its storage has 4; the"):
        read_torch_file(tmp_path / "b.pt")
