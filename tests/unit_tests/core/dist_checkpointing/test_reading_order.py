"""Readers in several threads: memory that a weight shares with its main parameter ends with the main parameter, and
errors of a device name the file."""

import errno
import os
import time

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, save
from megatron.core.dist_checkpointing import reader as reader_module
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.reader import CheckpointReader, load_from
from megatron.core.groups.process_groups import Group


def test_main_parameters_are_read_when_weights_are_there(tmp_path, monkeypatch):
    exact = torch.rand(4, 4)
    stored = {"model.w": exact.bfloat16().float(), "optimizer.main_param.w": exact}
    save({name: ShardedTensor(name, value, (4, 4), (0, 0)) for name, value in stored.items()}, tmp_path / "saved")
    reader, memory = CheckpointReader(tmp_path / "saved"), torch.zeros(4, 4)
    read_into = reader.read_into

    def slow_for_weights(tensor):
        time.sleep(0.2 * tensor.name.startswith("model."))
        read_into(tensor)

    monkeypatch.setattr(reader, "read_into", slow_for_weights)
    load_from(reader, {name: ShardedTensor(name, memory, (4, 4), (0, 0)) for name in stored}, group=Group("world"))
    assert torch.equal(memory, exact)


def test_an_error_of_the_device_names_the_file_of_the_checkpoint(tmp_path, monkeypatch):
    """EIO comes with the read, without a file name, and not when the file is opened."""
    save({"w": ShardedTensor("w", torch.ones(4), (4,), (0,))}, tmp_path / "saved")
    reader, open_regular = CheckpointReader(tmp_path / "saved"), reader_module.open_regular

    class FailingFile:
        def __init__(self, *args, **options):
            self.file = open_regular(*args, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def seek(self, position):
            pass

        def readinto(self, view):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(reader_module, "open_regular", FailingFile)
    message = r"saved/.*\.safetensors: cannot be read \(Input/output error\)"
    with pytest.raises(CheckpointDamagedError, match=message):
        load_from(reader, {"w": ShardedTensor("w", torch.zeros(4), (4,), (0,))}, group=Group("world"))
