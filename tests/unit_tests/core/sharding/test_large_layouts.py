"""Declared parameters on layouts of up to 64 ranks, without communication: every rank's model is built in one process.

For every parameter: the ranks that reduce a gradient hold the same elements of it, the ranks that count it in the norm
hold every element once, every copy is compared by the replica check, and initial values do not depend on the layout.
"""

import collections
import dataclasses

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.distributed.replicas import _AXES
from megatron.core.groups.process_groups import RankGrid, build_process_groups
from megatron.core.sharding.placement import counts_on_this_rank, data_parallel_groups, global_name, local_rectangle
from megatron.core.sharding.rectangles import Rectangle, coverage_problem
from megatron.core.sharding.sharded_tensor import module_tensors
from megatron.training.config.resolve import rank_order
from megatron.training.start.parallelize import build_model
from megatron.training.tasks.language_model import task_class
from megatron.training.verify.layout_trace import with_synthetic_data
from tests.test_utils.layout_table import MODELS
from tests.test_utils.layouts import VOCAB_SIZE, Layout, configure
from tests.test_utils.specs import named_specs

SP = "--sequence-parallel"
WIDE = "--num-attention-heads 8 --num-experts 8 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16"
LAYOUTS = {
    "dense": ("full", f"--tensor-model-parallel-size 4 {SP} --context-parallel-size 2", 32),
    "dense without sp": ("full-rms", "--tensor-model-parallel-size 4 --context-parallel-size 4", 16),
    "tied": ("gpt2", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 4", 16),
    "other order": (
        "gpt2", "--pipeline-model-parallel-size 4 --num-layers 4 --use-tp-pp-dp-mapping --tensor-model-parallel-size 2",
        16,
    ),
    "latent": ("full-latent", "--tensor-model-parallel-size 4 --context-parallel-size 2", 16),
    "experts": (
        f"full-experts {WIDE}", f"--tensor-model-parallel-size 8 {SP} --expert-model-parallel-size 8"
        " --expert-tensor-parallel-size 2", 64,
    ),
    "wide experts": (
        "full-gated-experts", f"--tensor-model-parallel-size 2 {SP} --context-parallel-size 2"
        " --expert-model-parallel-size 4 --expert-tensor-parallel-size 4", 32,
    ),
    "one expert-parallel rank": (
        "full-gated-experts", f"--tensor-model-parallel-size 4 {SP} --expert-tensor-parallel-size 1", 16,
    ),
    "experts in a pipeline": (
        "moe-deep", f"--tensor-model-parallel-size 2 {SP} --pipeline-model-parallel-size 2 --expert-model-parallel-size"
        " 4 --expert-tensor-parallel-size 1 --context-parallel-size 2", 32,
    ),
    "bert": ("bert-full", f"--tensor-model-parallel-size 4 {SP}", 8),
    "t5": ("t5-full-relative", f"--tensor-model-parallel-size 4 {SP}", 8),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter on one rank."""

    name: str
    """Global name."""
    rectangle: Rectangle
    reduce: tuple[int, ...]
    """Ranks that sum its gradient."""
    model: tuple[int, ...]
    """Ranks that together count each element of it once in the gradient norm."""
    counted: bool


def settings(model, layout, world_size):
    name, _, more = model.partition(" ")
    family = name.partition("-")[0] if name.startswith(("bert", "t5")) else "gpt"
    row = Layout(f"{MODELS[name]} {more}", f"--micro-batch-size 1 --global-batch-size 64 {layout}", 1, family=family)
    return configure(row.argv, world_size, "fp32", family)


def build(cfg, groups, monkeypatch):
    """This rank's model chunk; the groups have no communicators."""
    monkeypatch.setattr(parallel_state, "get_process_groups", lambda: groups)
    task = with_synthetic_data(task_class(cfg.model_family), VOCAB_SIZE)(cfg)
    (model,) = build_model(task, torch.device("cpu"))
    return model


def all_ranks(cfg, world_size, monkeypatch):
    """(groups, model) of every rank. Ranks at the same place of the model axes share one built model."""
    grid = RankGrid.from_world(
        world_size, tp=cfg.model.tensor_model_parallel_size, pp=cfg.model.pipeline_model_parallel_size,
        cp=cfg.model.context_parallel_size, ep=cfg.model.expert_model_parallel_size,
        etp=cfg.model.expert_tensor_parallel_size,
        order=rank_order(cfg),
    )  # fmt: skip
    built = {}
    for rank in range(world_size):
        groups = build_process_groups(grid, rank, lambda name, lists: (object(), None))
        place = tuple(getattr(groups, axis).rank for axis in ("tp", "pp", "ep", "etp"))
        if place not in built:
            built[place] = build(cfg, groups, monkeypatch)
        yield groups, built[place]


def held_by(groups, model):
    for name, _, spec in named_specs(model):
        dp = data_parallel_groups(spec, groups)
        yield Held(
            global_name(name, spec), local_rectangle(spec, groups), dp.reduce.ranks, dp.model.ranks,
            counts_on_this_rank(spec, groups),
        )  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_declarations_hold_on_every_rank(monkeypatch, name):
    model, layout, world_size = LAYOUTS[name]
    cfg = settings(model, layout, world_size)
    ranks = list(all_ranks(cfg, world_size, monkeypatch))
    stored = [list(held_by(groups, model)) for groups, model in ranks]
    one_rank = build(settings(model, "", 1), build_process_groups(RankGrid(), 0, None), monkeypatch)
    expected = module_tensors(one_rank, groups=build_process_groups(RankGrid(), 0, None))
    shapes = {tensor.name: tensor.global_shape for tensor in expected.values()}
    assert {item.name for rank in stored for item in rank} == {name for name, _ in one_rank.named_parameters()}
    places = [{(parameter.name, parameter.rectangle) for parameter in parameters} for parameters in stored]
    for rank, parameters in enumerate(stored):
        for parameter in parameters:
            same = {other for other in range(world_size) if (parameter.name, parameter.rectangle) in places[other]}
            # a sum over ranks with other elements would mix the columns of one tensor
            assert {rank} <= set(parameter.reduce) <= same, ("gradient", rank, parameter)
            first = [
                at.rectangle
                for other in parameter.model
                for at in stored[other]
                if at.name == parameter.name and at.counted
            ]
            assert coverage_problem(shapes[parameter.name], first) == "", ("gradient norm", rank, parameter)
    check_replicas_are_connected([groups for groups, _ in ranks], stored)
    for groups, model in {id(model): (groups, model) for groups, model in ranks}.values():
        for tensor in module_tensors(model, groups=groups).values():
            full = expected[tensor.name].local
            assert torch.equal(tensor.local, tensor.rectangle.of(full)), tensor.name


def check_replicas_are_connected(groups, stored):
    """Steps along the axes that the replica check compares lead from each copy of a rectangle to every other."""
    holders = collections.defaultdict(set)
    for rank, parameters in enumerate(stored):
        for parameter in parameters:
            holders[parameter.name, parameter.rectangle].add(rank)
    for key, ranks in holders.items():
        reached, waiting = set(), [min(ranks)]
        while waiting:
            rank = waiting.pop()
            if rank not in reached:
                reached.add(rank)
                waiting += [other for axis in _AXES for other in getattr(groups[rank], axis).ranks if other in ranks]
        assert reached == ranks, key
