"""Sums over ranks include every group and keep the dtype of their terms, also on ranks without terms."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads, partial_gradients
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.optimizer import clip_grads
from megatron.core.sharding.placement import Partial, Zeros, parameter
from megatron.core.statistics import StatisticsSum, StepStatistics

ODD = float(2**24 + 1)
"""Not a float32 number."""


def test_each_group_of_a_share_is_summed_over_in_order(monkeypatch):
    """The value of the second group is already summed over the first one."""
    handles = []

    def all_reduce(value, group):
        handles.append(group)
        value *= {"shard": 2, "model": 3, "experts": 5}[group]

    monkeypatch.setattr(clip_grads.dist, "all_reduce", all_reduce)
    shard, model, experts = (Group(name, (0, 1), 0, name) for name in ("shard", "model", "experts"))
    single = Group("single", (0,), 0, "single")
    shares = [([torch.ones(1)], (shard, model)), ([torch.ones(1), torch.ones(1)], (single, experts)), ([], (model,))]
    total = clip_grads.sum_over_model(shares, lambda tensors: sum(tensors, torch.zeros(1)).sum())
    assert total.item() == 1 * 2 * 3 + 2 * 5 + 0 and handles == ["shard", "model", "experts", "model"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_tokens_of_a_batch_are_added_up_exactly(monkeypatch, dtype):
    """2^24 + 1 on each of four ranks; the normalization uses the exact sum."""
    scaled, groups = [], []

    def all_reduce(value, group):
        groups.append(group)
        value *= 2

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    chunk = SimpleNamespace(
        finish_grad_sync=lambda: None, parameters=lambda: [], fp8_stacks=[],
        scale_gradients=lambda factor: scaled.append(factor.item()),
    )  # fmt: skip
    pair = {name: Group(name, (0, 1), 0, name) for name in ("dp_cp", "pp")}
    counted = torch.tensor(ODD, dtype=torch.float64).to(dtype)
    total = finalize_model_grads(
        [chunk], counted, groups=replace(SINGLE_PROCESS, **pair), sum_statistics=False
    )
    assert total.item() == 4 * ODD and groups == ["dp_cp", "pp"] and scaled == [1.0 / (4 * ODD)]
    assert counted.item() == ODD, "the caller's count stays its own"


class Layer(nn.Module):
    def __init__(self, statistics):
        super().__init__()
        self.statistics, self.totals = statistics, {}

    def end_step(self, totals):
        self.totals = totals


def sums_of_stages(rank, world):
    """Only the last stage has a module with statistics."""
    groups = parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    layers = []
    if groups.pp.is_last:
        layers.append(Layer(StepStatistics("layer 2", tokens_per_expert=2)))
        layers[0].statistics.add("tokens_per_expert", torch.tensor([ODD, 3.0], dtype=torch.float64))
    totals = StatisticsSum(layers, groups)(torch.device("cpu"))
    return totals["layer 2"]["tokens_per_expert"].tolist(), [
        layer.totals["tokens_per_expert"].dtype for layer in layers
    ]


def test_a_stage_without_statistics_sums_in_the_width_of_the_others(gloo_pool):
    assert gloo_pool.run(sums_of_stages, 2) == [([ODD, 3.0], []), ([ODD, 3.0], [torch.float64])]


def test_partial_gradients_of_several_dtypes_are_not_rounded_to_one(monkeypatch):
    """A float32 gradient next to a bfloat16 one, in either order."""
    dtypes = []

    def all_reduce(value, group):
        dtypes.append(value.dtype)
        value *= 2

    monkeypatch.setattr(partial_gradients.dist, "all_reduce", all_reduce)
    tp = Group("tp", (0, 1), 0, "tp")
    groups = replace(SINGLE_PROCESS, tp=tp, world=replace(tp, name="world"))
    net = nn.Module()
    for name, dtype in (("narrow", torch.bfloat16), ("wide", torch.float32), ("again", torch.bfloat16)):
        built = parameter((3,), init=Zeros(), partial=("tp",), dtype=dtype, groups=groups)
        built.grad = torch.full((3,), 1.0 + 2.0**-12).to(dtype)
        net.register_parameter(name, built)
    assert all(isinstance(item.spec.grad["tp"], Partial) for item in net.parameters())
    partial_gradients.sum_partial_gradients([net], groups)
    assert dtypes == [torch.bfloat16, torch.float32]
    assert net.wide.grad.tolist() == [2.0 + 2.0**-11] * 3 and net.narrow.grad.tolist() == [2.0] * 3
