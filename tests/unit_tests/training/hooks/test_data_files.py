"""Data files that change during a run are detected before a checkpoint is written."""

import os
import shutil

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.data.blend import Split
from megatron.data.index_format import IndexedDatasetError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.training.hooks.data_files import BusErrorGuard, DataFilesHook, data_file_hooks, opened_files
from megatron.training.observe.kinds.save import SAVING
from megatron.training.train_state import TrainState
from tests.test_utils.gpt_runs import write_dataset


@pytest.fixture
def data(tmp_path):
    return IndexedDataset(str(write_dataset(tmp_path / "numbers")))


def test_a_file_that_is_cut_stops_the_run_by_name(data):
    hook = DataFilesHook([data], log_interval=2)
    hook.check()
    os.truncate(data.path_prefix + ".bin", os.path.getsize(data.path_prefix + ".bin") - 100)
    hook._not_before = 0.0
    hook.on_step(TrainState(iteration=3), None)
    for call in (lambda: hook.on_step(TrainState(iteration=4), None), lambda: hook.on_record(SAVING, {"iteration": 3})):
        with pytest.raises(IndexedDatasetError, match=r"numbers\.bin was cut .* it had \d+ bytes and has \d+"):
            call()


def test_log_points_are_passed_over_where_looking_is_slow(data):
    hook = DataFilesHook([data], log_interval=1)
    hook._not_before = float("inf")
    os.truncate(data.path_prefix + ".bin", 10)
    hook.on_step(TrainState(iteration=1), None)
    with pytest.raises(IndexedDatasetError):
        hook.on_record(SAVING, {"iteration": 1})


@pytest.mark.parametrize("change", ["touched", "replaced", "removed", "grown"])
def test_other_changes_are_warned_of_once(data, caplog, change):
    hook, path = DataFilesHook([data], log_interval=1), data.path_prefix + ".bin"
    expected = [data[i].tolist() for i in range(len(data))]
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "replaced":
        shutil.copy(path, path + ".new")
        os.truncate(path + ".new", 10)
        os.replace(path + ".new", path)
    elif change == "removed":
        os.unlink(path)
    else:
        with open(path, "ab") as file:
            file.write(b"more")
    hook.check()
    hook.check()
    [line] = caplog.messages
    assert path in line
    assert [data[i].tolist() for i in range(len(data))] == expected


def test_the_files_below_any_data_set_are_found_once(data, tmp_path, monkeypatch):
    other = IndexedDataset(str(write_dataset(tmp_path / "others", seed=1)))
    config = GPTDatasetConfig(random_seed=1, sequence_length=8, blend=([data.path_prefix], None), split="1,1,1")
    pair = [
        GPTDataset(item, item.path_prefix, np.arange(20, dtype=np.int32), 10, Split.train, config)
        for item in (data, other)
    ]
    blend = BlendedDataset(pair, [0.5, 0.5], 8, config)
    assert list(opened_files([blend])) == [data, other]
    guard, hook = data_file_hooks((blend, [pair[0]], None), log_interval=1)
    assert len(hook.files) == len(guard.datasets) == 2
    assert data_file_hooks((None, iter(()), object(), [1, 2]), log_interval=1) == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    [guard] = data_file_hooks((blend, None, None), log_interval=1)  # SIGBUS ends any rank; one rank per host compares
    assert isinstance(guard, BusErrorGuard)
