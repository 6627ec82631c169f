"""Docstrings that say "Raises X for Y": each row provokes a Y and expects the X, and the docstring must still claim it.

A changed claim fails here, so that docstring, code and row stay together."""

import inspect
import json
import math
import os
import struct
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.compat.batches import get_batch_on_this_tp_rank
from megatron.core.config.errors import UserError, call_all
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import read_tracker
from megatron.core.groups.process_groups import SINGLE_PROCESS, RankGrid
from megatron.core.inference.server.json_text import json_bytes
from megatron.core.parallel_state import resolve_group
from megatron.core.pipeline_parallel.choose import build_schedule
from megatron.core.safe_files import make_folder, open_private, parse_json
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.utils import split_tensor_into_1d_equal_chunks
from megatron.core.transformer.recompute import Recompute
from megatron.data.blend import parse_and_normalize_split
from megatron.data.indexed_writer import IndexedDatasetBuilder
from megatron.export.safetensors_header import read_header
from megatron.export.torch_file import _read_zip, read_torch_file
from megatron.training.report.plan.cluster import build_cluster


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def safetensors(folder, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return write(folder / "file.safetensors", struct.pack("<Q", len(text)) + text + data)


def add_document(folder, tokens, lengths):
    with IndexedDatasetBuilder(f"{folder}/data.bin", dtype=np.uint16) as builder:
        builder.add_document(np.array(tokens), lengths)


def linked(folder):
    """A link to a folder, a file, a file with two names."""
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(folder / "folder")
    write(folder / "file", "")
    os.link(folder / "file", folder / "second name")
    return folder


class RaisesFor:
    """Fails with ``error``."""

    def __init__(self, error):
        self.error = error

    def __call__(self):
        raise self.error


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SCHEDULE = SimpleNamespace(
    pipeline_schedule="interleaved", delay_wgrad_compute=False, microbatch_group_size_per_virtual_pipeline_stage=None
)
SELECTIVE = SimpleNamespace(recompute_granularity="selective", recompute_modules=["core_attn", "atention"])
ROWS = [
    (parse_json, "ValueError for invalid JSON", ValueError, None, lambda f, at: f("{1: 2}")),
    (parse_json, "nesting deeper than Python's stack", ValueError, None, lambda f, at: f("[" * 200_000)),
    (
        parse_json,
        "reject a key that a table has twice",
        ValueError,
        None,
        lambda f, at: f('{"a": 1, "a": 2}', unique=True),
    ),
    (parse_json, "NaN and infinities", ValueError, None, lambda f, at: f("[NaN]", unique=True)),
    (json_bytes, "ValueError for NaN and infinities", ValueError, None, lambda f, at: f({"a": [math.nan]})),
    (json_bytes, "ValueError for NaN and infinities", ValueError, None, lambda f, at: f(-math.inf)),
    (make_folder, "a link, even to a folder", OSError, None, lambda f, at: f(linked(at) / "link")),
    (make_folder, "a file", OSError, None, lambda f, at: f(linked(at) / "file")),
    (make_folder, "missing parents", OSError, None, lambda f, at: f(at / "a" / "b")),
    (open_private, "a link", OSError, None, lambda f, at: f(linked(at) / "link")),
    (open_private, "a second name (hard link)", OSError, None, lambda f, at: f(linked(at) / "file")),
    (parse_and_normalize_split, "other text", UserError, "--split", lambda f, at: f("a,b,c")),
    (parse_and_normalize_split, "signs and exponents", UserError, "--split", lambda f, at: f("1e2,1,1")),
    (parse_and_normalize_split, "signs and exponents", UserError, "--split", lambda f, at: f("+9,1,0")),
    (parse_and_normalize_split, "more than three numbers", UserError, "--split", lambda f, at: f("1,1,1,1")),
    (parse_and_normalize_split, "a sum of 0", UserError, "--split", lambda f, at: f("0,0,0")),
    (
        IndexedDatasetBuilder.add_document,
        "ValueError if the lengths do not sum",
        ValueError,
        None,
        lambda f, at: add_document(at, [1, 2, 3], [2]),
    ),
    (
        IndexedDatasetBuilder.add_document,
        "UserError for ids that do not fit",
        UserError,
        "65536",
        lambda f, at: add_document(at, [1, 65536], [2]),
    ),
    (
        read_tracker,
        "CheckpointError for other content",
        CheckpointError,
        None,
        lambda f, at: f(write(at / "latest_checkpointed_iteration.txt", "ten").parent),
    ),
    (
        read_tracker,
        "a file that is not small and regular",
        CheckpointError,
        None,
        lambda f, at: f(write(at / "latest_checkpointed_iteration.txt", "1" * 10_000).parent),
    ),
    (read_tracker, "FileNotFoundError without tracker", FileNotFoundError, None, lambda f, at: f(at)),
    (read_header, "the file cannot be read", CheckpointDamagedError, "cannot be read", lambda f, at: f(at / "none")),
    (read_header, "is truncated", CheckpointDamagedError, "truncated", lambda f, at: f(write(at / "short", b"\x09"))),
    (read_header, "has no JSON header", CheckpointDamagedError, "no JSON", lambda f, at: f(safetensors(at, b"[1,"))),
    (
        read_header,
        "the message names the tensor",
        CheckpointDamagedError,
        "layer.weight",
        lambda f, at: f(safetensors(at, {"layer.weight": {**ENTRY, "data_offsets": [0, 4]}}, b"0" * 8)),
    ),
    (
        read_header,
        "the message names the tensor",
        CheckpointDamagedError,
        "layer.weight",
        lambda f, at: f(safetensors(at, {"layer.weight": {**ENTRY, "dtype": "F33"}}, b"0" * 8)),
    ),
    (
        Recompute, "UserError for names", UserError, "atention",
        lambda f, at: f(SELECTIVE, torch.nn.Linear(1, 1), SINGLE_PROCESS),
    ),
    (
        build_schedule,
        "UserError if the schedule does not support",
        UserError,
        "chunks",
        lambda f, at: f(SCHEDULE, 2, 1, 4),
    ),
    (build_cluster, "UserError for impossible values", UserError, "--nodes -1", lambda f, at: f("H100", -1, 8)),
    (
        RankGrid.from_world,
        "UserError if the world is not divisible",
        UserError,
        "world size 6",
        lambda f, at: f(6, tp=4),
    ),
    (
        gather_from_sequence_parallel_region,
        "without ``tensor_parallel_output_grad``",
        ValueError,
        None,
        lambda f, at: f(torch.ones(2), tensor_parallel_output_grad=False, output_split_sizes=[2]),
    ),
    (
        get_batch_on_this_tp_rank,
        "UserError for ``is_hybrid_cp``",
        UserError,
        "--hybrid-context-parallel",
        lambda f, at: f({}, is_hybrid_cp=True),
    ),
    (
        call_all,
        "each line once",
        UserError,
        "one\ntwo$",
        lambda f, at: f([RaisesFor(UserError("one")), int, RaisesFor(UserError("two")), RaisesFor(UserError("one"))]),
    ),
    (
        call_all,
        "in the class of all problems if they have the same",
        CheckpointError,
        None,
        lambda f, at: f([RaisesFor(CheckpointError("one")), RaisesFor(CheckpointError("two"))]),
    ),
    (
        call_all,
        "Other errors propagate at once",
        KeyError,
        None,
        lambda f, at: f([RaisesFor(KeyError("a")), pytest.fail]),
    ),
]


@pytest.mark.parametrize(
    "function, claim, error, message, provoke", ROWS, ids=[f"{row[0].__name__}: {row[1]}" for row in ROWS]
)
def test_documented_errors_are_raised(function, claim, error, message, provoke, tmp_path):
    assert claim in " ".join(inspect.getdoc(function).split()), "the docstring claims something else: change the row"
    with pytest.raises(error, match=message):
        provoke(function, tmp_path)


def test_a_chunk_of_a_tensor_that_is_not_divisible_is_rejected(gloo_pool):
    assert "ValueError if the number of elements is not divisible" in " ".join(
        inspect.getdoc(split_tensor_into_1d_equal_chunks).split()
    )
    assert gloo_pool.run(split_in_two, 2) == ["ValueError", "ValueError"]


def split_in_two(rank, world_size):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    try:
        split_tensor_into_1d_equal_chunks(torch.ones(3))
    except ValueError as error:
        return type(error).__name__


def test_a_group_without_a_program_holds_only_this_process():
    assert "a group of this process only if no program was initialized" in " ".join(
        inspect.getdoc(resolve_group).split()
    )
    assert resolve_group(None, "tp").size == 1


def test_storages_without_records_are_damage_when_their_tensors_are_made(tmp_path):
    """As the docstring of ``_read_zip`` says, it does not check them."""
    assert "Whether storages have records is checked when their tensors are made" in " ".join(
        inspect.getdoc(_read_zip).split()
    )
    torch.save({"weight": torch.ones(3)}, tmp_path / "full.pt")
    with zipfile.ZipFile(tmp_path / "full.pt") as full, zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut:
        for name in full.namelist():
            if not name.endswith("/data/0"):
                cut.writestr(name, full.read(name))
    assert torch.equal(read_torch_file(tmp_path / "full.pt")["weight"].read(), torch.ones(3))
    with pytest.raises(CheckpointDamagedError, match="record data/0 of 12 bytes is not there"):
        read_torch_file(tmp_path / "cut.pt")
