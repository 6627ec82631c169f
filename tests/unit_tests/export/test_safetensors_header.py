"""Headers of safetensors files: what the safetensors library rejects is rejected, with the tensor and the reason."""

import json
import random
import re
import time

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.export.files import read_safetensors
from megatron.export.safetensors_header import read_header


def entry(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write(path, header, num_bytes):
    """A file of ``header`` (a table, or its text) and ``num_bytes`` bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def library_takes(path):
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dictionary)
                file.get_tensor(name)
        return True
    except (SafetensorError, OSError, ValueError):  # ValueError: a name with a lone surrogate
        return False


A, B = entry(0, 8), entry(8, 16)
TWICE = b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(B).encode() + b"}"
ACCEPTED = {
    "in order": ({"a": A, "b": B}, 16),
    "in another order": ({"b": B, "a": A}, 16),
    "without tensors": ({}, 0),
    "with metadata": ({"__metadata__": {"format": "pt"}, "a": A}, 8),
    "without elements": ({"a": entry(0, 0), "b": entry(0, 8), "c": entry(8, 8, shape=[3, 0])}, 8),
    "a scalar": ({"a": entry(0, 4, shape=[])}, 4),
    "padded with spaces": (b" " + json.dumps({"a": A}).encode() + b"   ", 8),
    "an unknown key": ({"a": {**A, "comment": "x"}}, 8),
}
REJECTED = {
    "overlap": ({"a": A, "b": entry(4, 12)}, 12, "tensor b at byte .* overlaps tensor a"),
    "the same place": ({"a": A, "b": A}, 8, "overlaps"),
    "a gap": ({"a": A, "b": entry(12, 20)}, 20, "tensor b at byte .* leaves a gap after tensor a"),
    "a gap at the start": ({"a": entry(4, 12)}, 12, "leaves a gap after the header"),
    "trailing bytes": ({"a": A}, 9, "has 1 bytes after its last tensor"),
    "trailing bytes without tensors": ({}, 5, "has 5 bytes after"),
    "truncated": ({"a": A, "b": B}, 12, "truncated: tensor b would end"),
    "a name twice": (TWICE, 16, "the key 'a' is there twice"),
    "a key of an entry twice": (b'{"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}', 4, "'dtype'"),
    "metadata that is no table": ({"__metadata__": [1], "a": A}, 8, "__metadata__ is not"),
    "metadata of numbers": ({"__metadata__": {"x": 1}, "a": A}, 8, "__metadata__ is not"),
    "another size": ({"a": entry(0, 8, shape=[3])}, 8, "the entry of tensor a is malformed"),
    "infinite shape": (b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', 8, "Infinity is not a JSON"),
    "infinite offsets": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e999]}}', 8, "malformed"),
    "NaN": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', 8, "NaN is not a JSON number"),
    "shape of fractions": ({"a": entry(0, 8, shape=[2.0])}, 8, "malformed"),
    "shape of texts": ({"a": entry(0, 8, shape=["2"])}, 8, "malformed"),
    "shape of switches": ({"a": entry(0, 4, shape=[True])}, 4, "malformed"),
    "negative": ({"a": entry(0, 8, shape=[-1, -2])}, 8, "malformed"),
    "ends before it begins": ({"a": {**A, "data_offsets": [8, 0]}}, 8, "malformed"),
    "beyond 64 bits": ({"a": entry(0, 8, shape=[2**64, 0])}, 8, "malformed"),
    "one offset": ({"a": {**A, "data_offsets": [8]}}, 8, "malformed"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "malformed"),
    "an unknown type": ({"a": entry(0, 8, "F33")}, 8, "is of type 'F33'"),
    "an entry that is a text": ({"a": "x"}, 0, "malformed"),
    "a list": (b"[]", 0, "no JSON table"),
    "no JSON": (b"{]", 0, "no JSON table"),
    "no UTF-8": (b'{"\xff":1}', 0, "no JSON table"),
    "deeper than the stack": (b'{"a":' * 10**5, 0, "nested too deeply"),
    "nothing": (b"", 0, "truncated, or no safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_complete_files_are_read_as_by_the_library(name, tmp_path):
    path = write(tmp_path / "a.safetensors", *ACCEPTED[name])
    assert library_takes(path)
    with safe_open(path, "pt") as file:
        expected = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert {key: tensor.shape for key, tensor in read_safetensors(path).items()} == expected
    assert {key: tuple(tensor.read().shape) for key, tensor in read_safetensors(path).items()} == expected


@pytest.mark.parametrize("name", REJECTED)
def test_files_that_the_library_rejects_are_rejected_with_the_reason(name, tmp_path):
    header, num_bytes, words = REJECTED[name]
    path = write(tmp_path / "a.safetensors", header, num_bytes)
    with pytest.raises(CheckpointDamagedError, match=f"a.safetensors: .*{words}") as error:
        read_safetensors(path)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
    assert not library_takes(path)


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\nb", "a\rb", "\x9b2J", "\u202egnp", "\ud800"])
def test_names_that_a_terminal_would_act_on_are_escaped_and_rejected(name, tmp_path):
    path = write(tmp_path / "a.safetensors", {name: A}, 8)
    with pytest.raises(UserError, match=re.escape(repr(name))) as error:
        read_safetensors(path)
    assert str(error.value).isprintable()


def test_every_message_escapes_control_characters():
    error = UserError("name \x1b[2J\x07\x9b of\ta\ntensor")
    assert str(error) == "name \\x1b[2J\\x07\\x9b of\ta\ntensor"
    assert str(UserError("größe 大きさ")) == "größe 大きさ"


def test_nothing_is_accepted_that_the_library_rejects(tmp_path):
    save_file({f"tensor.{i}": torch.arange(i, dtype=torch.int32) for i in range(1, 5)}, tmp_path / "a.safetensors")
    full = (tmp_path / "a.safetensors").read_bytes()
    path, generator, selected = tmp_path / "b.safetensors", random.Random(7), 0
    length = int.from_bytes(full[:8], "little")
    for _ in range(600):
        data = bytearray(full)
        for _ in range(generator.choice([1, 1, 2])):
            digits = [at for at in range(8, 8 + length) if chr(data[at]).isdigit()]
            at = generator.choice([generator.choice(digits), generator.randrange(8, 8 + length)])
            data[at] = generator.choice([generator.randrange(256), *b'0123456789,]}"- '])
        path.write_bytes(data)
        try:
            read_header(path)
        except CheckpointDamagedError:
            continue
        selected += 1
        assert library_takes(path), bytes(data)
    assert selected > 10, "changes of names are no damage"


def test_many_names_take_seconds(tmp_path):
    path = write(tmp_path / "a.safetensors", {f"tensor.{i}": entry(0, 0) for i in range(30_000)}, 0)
    started = time.process_time()
    assert len(read_safetensors(path)) == 30_000
    assert time.process_time() - started < 20, "one pass over the names takes 1 s"
