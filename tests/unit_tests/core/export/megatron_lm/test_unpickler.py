"""The unpickler of Megatron-LM's files: tensors and plain data come out, nothing that a file names is called."""

import argparse
import collections
import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.export.megatron_lm.archive import read_archive
from megatron.core.export.megatron_lm.unpickler import Record, unpickle

CALLED = []


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
def test_a_pickle_that_calls_is_refused_by_name(value, named, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=named):
        unpickle(pickle.dumps(value, protocol), "file")
    assert not os.listdir(tmp_path) and not CALLED


def test_classes_of_other_programs_are_records_and_run_nothing():
    value = unpickle(pickle.dumps({"a": SetsState(), "b": Calls(call, 1)}), "file")
    assert isinstance(value["a"], Record) and value["a"].kind.endswith("SetsState") and value["a"]["a"] == 1
    assert isinstance(value["b"], Record) and value["b"].args == (1,)
    assert not CALLED


def test_a_reduce_of_what_a_reduce_made_is_refused():
    with pytest.raises(CheckpointError):
        unpickle(b"\x80\x02cmegatron\nA\n)R)R.", "file")


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
        unpickle(data, "file")


def test_a_key_nested_a_million_deep_is_refused():
    with pytest.raises(CheckpointError, match="key"):
        unpickle(b"\x80\x02})" + b"\x85" * 10**5 + b"Ns.", "file")
    with pytest.raises(CheckpointError, match="key"):
        deep = b"(lp0\n(lp1\n)" + b"\x85" * 10**5 + b"aNaa"
        unpickle(b"\x80\x02ccollections\nOrderedDict\n" + deep + b"\x85R.", "file")


def test_tensors_are_read_lazily_and_equal(tmp_path):
    whole = torch.arange(60.0).view(3, 4, 5)
    saved = {
        "whole": whole, "view": whole[1:, :, ::2], "turned": whole.transpose(0, 2), "bf16": whole.bfloat16(),
        "scalar": torch.tensor(3), "empty": torch.empty(0, 3, dtype=torch.int32),
        "parameter": torch.nn.Parameter(whole[0]),
        "nested": collections.OrderedDict(a=[(torch.ones(2, dtype=torch.int64), "text")]),
        "args": argparse.Namespace(lr=1.0, names=["a"]), "double": np.float64(2.5), "bytes": io.BytesIO(b"abc"),
        "random": np.random.get_state(), "dtype": torch.float16, "size": torch.Size([1, 2]),
    }  # fmt: skip
    torch.save(saved, tmp_path / "a.pt")
    read = read_archive(tmp_path / "a.pt")
    for name in ("whole", "view", "turned", "bf16", "scalar", "empty", "parameter"):
        assert torch.equal(read[name].read(), saved[name].detach())
        assert read[name].dtype == read[name].read().dtype == saved[name].dtype
    assert torch.equal(read["nested"]["a"][0][0].read(), torch.ones(2, dtype=torch.int64))
    assert read["args"]["lr"] == 1.0 and read["double"] == 2.5 and read["bytes"]["state"][0] == b"abc"
    assert read["dtype"] is torch.float16 and list(read["size"]) == [1, 2]
    data = b"x" * 7 + (tmp_path / "a.pt").read_bytes() + b"rest"
    (tmp_path / "b").write_bytes(data)
    inside = read_archive(tmp_path / "b", 7, len(data) - 11)
    assert torch.equal(inside["view"].read(), saved["view"])


def test_damaged_files_end_in_one_message(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(100)}, path)
    whole = path.read_bytes()
    with pytest.raises(CheckpointError, match="is missing"):
        read_archive(tmp_path / "b.pt")
    for data in (whole[: len(whole) // 2], b"", b"old format"):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="a.pt"):
            read_archive(path)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="before 1.6"):
        read_archive(path)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"K\x04\x85", b"K\x05\x85") if name.endswith("data.pkl") else data)
    with pytest.raises(CheckpointError, match="cannot hold"):
        read_archive(tmp_path / "b.pt")
