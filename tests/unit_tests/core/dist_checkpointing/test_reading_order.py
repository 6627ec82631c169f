"""Readers in several threads: memory that a weight shares with its main parameter ends with the main parameter."""

import time

import torch

from megatron.core.dist_checkpointing import ShardedTensor, save
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
