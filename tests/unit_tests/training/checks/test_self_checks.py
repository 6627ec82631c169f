"""A model with a hole or a double does not train; a copy that drifts by one bit is named."""

import contextlib
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.core.description.model import ModelDescription, Param, Piece
from megatron.core.groups.process_groups import RankGrid
from megatron.core.sharding.rectangles import Rectangle
from megatron.training.checks.self_checks import Holding, ReplicaCheck, describe_layout, find_problems
from tests.test_utils.gpt_runs import train_resolved
from tests.test_utils.layout_table import row
from tests.test_utils.layouts import VOCAB_SIZE, configure


def layer(index, stage=0, offsets=(0, 0), lengths=(4, 4), tied=False):
    return Holding(f"decoder.layers.{index}.weight", (4, 4), Rectangle(offsets, lengths), stage, tied)


def test_complete_models_have_no_problems():
    halves = [layer(0, offsets=(0, 0), lengths=(2, 4)), layer(0, offsets=(2, 0), lengths=(2, 4))]
    assert not list(find_problems([*halves, layer(1, 1), layer(1, 1)], 2, 32))


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([layer(0)], "layer 2 is on no rank"),
        ([layer(0), layer(1), layer(2)], "layer 3 is beyond --num-layers 2"),
        ([layer(0), layer(1), layer(1, 1)], "decoder.layers.1.weight on stages 0 and 1, without being tied"),
        ([layer(0, lengths=(2, 4)), layer(1)], "decoder.layers.0.weight: the ranks hold 8 of its 16 elements"),
        ([layer(0), layer(1)._replace(shape=(5, 4))], "20 elements"),
    ],
)
def test_holes_and_doubles_are_named(pieces, words):
    assert words in "; ".join(find_problems(pieces, 2, None))


def branch(name, index):
    param = Param(f"decoder.layers.{index}.{name}.weight", (4, 4))
    return Piece({"self_attention": "attention", "mlp": "feed-forward"}[name], (param,), is_branch=True)


TWO_LAYERS = ModelDescription(
    Piece("embedding"), tuple((branch("self_attention", i), branch("mlp", i)) for i in range(2)),
    Piece("output layer"),
)  # fmt: skip


def held(index, name, stage=0, shape=(4, 4)):
    return Holding(f"decoder.layers.{index}.{name}.weight", shape, Rectangle.whole(shape), stage, False)


def test_every_branch_of_a_layer_is_wanted_once():
    first, last = [held(0, "self_attention"), held(0, "mlp")], [held(1, "self_attention"), held(1, "mlp", 1)]
    assert not list(find_problems([*first, *last], 2, 64, TWO_LAYERS))
    result = find_problems([*first, last[0]], 2, 64, TWO_LAYERS)
    assert "the feed-forward branch of layer 2 is on no rank" in list(result)
    assert "the attention branch of layer 2 is on no rank" in list(find_problems([*first, last[1]], 2, 64, TWO_LAYERS))
    doubled = "; ".join(find_problems([*first, *last, held(1, "self_attention", 1)], 2, 64, TWO_LAYERS))
    assert doubled == "decoder.layers.1.self_attention.weight on stages 0 and 1, without being tied"
    grid = RankGrid(pp=2)
    assert list(describe_layout(grid, [*first, *last], TWO_LAYERS))[-2:] == [
        "  stage 0 (ranks 0): layer 1 + attention of layer 2; 48 parameters",
        "  stage 1 (ranks 1): feed-forward of layer 2; 16 parameters",
    ]


def test_check_names_parameters_that_the_settings_do_not_create():
    pieces = [held(0, "self_attention"), held(0, "mlp", shape=(4, 2)), held(1, "self_attention"), held(1, "mlp"),
              held(1, "adapter")]  # fmt: skip
    result = list(find_problems(pieces, 2, None, TWO_LAYERS))
    assert result == [
        "decoder.layers.0.mlp.weight has the shape (4, 2), the settings make (4, 4)",
        "the settings make no decoder.layers.1.adapter.weight",
    ]


def test_layers_without_one_of_the_branches_are_another_programs_business():
    assert not list(find_problems([held(0, "self_attention"), held(0, "mlp"), held(1, "mlp")], 2, None))


def test_a_wrong_sum_is_a_problem():
    (words,) = find_problems([layer(0)], 1, 17, task="GPTTask")
    assert words.startswith("the ranks hold 16 parameters, GPTTask.num_parameters() makes 17 of the settings")


def test_the_layout_is_readable():
    grid = RankGrid(tp=2, pp=2, dp=2)
    assert list(describe_layout(grid, [layer(0), layer(1), layer(2, 1)])) == [
        "layout: 8 ranks = tensor 2 x context 1 x data 2 x pipeline 2; order tp-cp-ep-dp-pp, fastest first",
        "  tensor ranks    [0 1] [2 3] [4 5] [6 7]",
        "  data ranks      [0 2] [1 3] [4 6] [5 7]",
        "  pipeline ranks  [0 4] [1 5] [2 6] [3 7]",
        "  stage 0 (ranks 0-3): layers 1-2; 32 parameters",
        "  stage 1 (ranks 4-7): layer 3; 16 parameters",
    ]


def build(rank, world_size, one, fault=None):
    """Builds a row's model and checks it; the problem, if any."""
    from megatron.training.checks.self_checks import BuildError, check_build
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data
    from tests.test_utils import layout_faults

    cfg = configure(one.argv, world_size, "fp32")
    with contextlib.nullcontext() if fault is None else getattr(layout_faults, fault)(rank):
        parts = build_components(cfg, with_synthetic_data(GPTTask, VOCAB_SIZE)(cfg), initialize_megatron(cfg))
    try:
        check_build(parts, cfg)
    except BuildError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "name",
    [
        "dp2", "zero2-gather", "tp4-sp-groups-below-ranks", "pp4-uneven", "pp2-vpp", "pp2-tp2-sp", "cut-pp4",
        "cut-pp2-tp2-sp", "ep2-etp2-dp8", "pp2-vpp-ep2", "tp2-sp-etp1-ep4",
    ],
)  # fmt: skip
def test_layouts_hold_the_model_once(gloo_pool, name):
    one = row(name)
    assert gloo_pool.run(build, one.world_size, one) == [None] * one.world_size


def test_a_dropped_layer_stops_every_rank_before_the_first_step(gloo_pool):
    messages = gloo_pool.run(build, 2, row("pp2-uneven"), "dropped_layer")
    assert messages[0] == messages[1] and "layer 7 is on no rank" in messages[0]
    assert "num_parameters() makes" in messages[0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dropped_half", "the feed-forward branch of layer 4 is on no rank"),
        ("doubled_half", "decoder.layers.1.input_layernorm.weight, decoder.layers.1.input_layernorm.bias, "
                         "decoder.layers.1.self_attention.linear_qkv.weight, … on stages 0 and 1, without being tied"),
    ],
)  # fmt: skip
def test_a_half_that_is_missing_or_doubled_stops_every_rank(gloo_pool, fault, words):
    messages = gloo_pool.run(build, 2, row("cut-pp2"), fault)
    assert messages[0] == messages[1] and words in messages[0]


def flip_a_bit_of_a_weight(parts):
    weight = dict(parts.model[0].named_parameters())["module.decoder.layers.1.input_layernorm.weight"]
    weight.data.view(-1).view(torch.int32)[3] ^= 1


def flip_a_bit_of_a_main_parameter(parts):
    """One bit of a norm in this rank's shard of the optimizer: its tensor-parallel peers hold copies."""
    masters = parts.optimizer.storage
    name = next(name for name in masters if name.endswith("layernorm.weight"))
    masters[name].kept[0] ^= 1


def train_with_drift(rank, world_size, argv, culprit, flip):
    """Flips a bit on rank ``culprit`` after the second step; what the run that checks its replicas says."""
    from megatron.training.checks.self_checks import ReplicasDiffer
    from megatron.training.step import TrainStep
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    def drifting_step(steps):
        metrics = step(steps)
        if rank == culprit and steps.state.iteration == 2:
            flip(steps.parts)
        return metrics

    cfg = configure(argv, world_size, "fp32")
    step = TrainStep.run
    with mock.patch.object(TrainStep, "run", drifting_step):
        try:
            make_task = with_synthetic_data(GPTTask, VOCAB_SIZE)
            train_resolved(cfg, lambda resolved, tokenizer: make_task(resolved))
        except ReplicasDiffer as error:
            return str(error)
    return None


SECOND = "iteration 2: copies differ from those of the first rank that holds them: "
WEIGHT = "decoder.layers.1.input_layernorm.weight"


@pytest.mark.parametrize("name", ["dp2", "tp2"])
def test_one_flipped_bit_of_a_weight_is_named_with_its_rank(gloo_pool, name):
    argv = [*row(name).argv, "--check-replicas", "1000"]
    messages = gloo_pool.run(train_with_drift, 2, argv, 1, flip_a_bit_of_a_weight)
    assert messages[0] == messages[1]
    assert messages[0].startswith(SECOND) and f"{WEIGHT} on rank 1" in messages[0]


def flip_a_bit_of_an_expert(parts):
    weight = dict(parts.model[0].named_parameters())["module.decoder.layers.1.mlp.experts.linear_fc2.weight"]
    weight.data.view(-1).view(torch.int32)[3] ^= 1


def test_one_flipped_bit_of_an_expert_is_named_with_its_rank(gloo_pool):
    """Ranks 1 and 3 hold the same experts, ranks 0 and 2 the others."""
    argv = [*row("ep2-dp4").argv, "--check-replicas", "1000"]
    messages = gloo_pool.run(train_with_drift, 4, argv, 3, flip_a_bit_of_an_expert)
    assert len(set(messages)) == 1 and messages[0].startswith(SECOND)
    assert "decoder.layers.1.mlp.experts.linear_fc2.weight on rank 3" in messages[0]


def test_one_flipped_bit_of_a_sharded_main_parameter_is_named(gloo_pool):
    """Ranks 2 and 3 are tensor-parallel: they hold the same shard of the optimizer, ranks 0 and 1 the other one."""
    argv = [*row("zero2-tp2").argv, "--bf16", "--check-weight-hash-across-dp-replicas-interval", "1000"]
    messages = gloo_pool.run(train_with_drift, 4, argv, 3, flip_a_bit_of_a_main_parameter)
    assert len(set(messages)) == 1 and messages[0].startswith(SECOND)
    assert re.fullmatch(r"main_param:decoder\.\S+layernorm\.weight on rank 3", messages[0].removeprefix(SECOND))


THREE_STEPS = ["--train-iters", "3", "--lr-warmup-iters", "0"]


class PlainNorm(torch.nn.Module):
    """A norm of a user: its weight declares no layout, or declares it with Megatron-LM's attributes."""

    def __init__(self, size, declared):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        if declared:
            self.weight.sequence_parallel = True

    def forward(self, hidden):
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight)


def train_with_a_custom_norm(rank, world_size, argv, declared):
    """The run's error, or the final norm's weight after the last step."""
    from megatron.core.config.errors import UserError
    from megatron.training.step import TrainStep
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    class Task(GPTTask):
        def model_provider(self, *args, **kwargs):
            model = super().model_provider(*args, **kwargs)
            model.decoder.final_layernorm = PlainNorm(self.cfg.model.hidden_size, declared)
            return model

        def num_parameters(self):
            return None

    weights = []

    def remember(steps):
        metrics = step(steps)
        weights.append(dict(steps.parts.model[0].named_parameters())["module.decoder.final_layernorm.weight"].tolist())
        return metrics

    cfg = configure(argv, world_size, "fp32")
    step = TrainStep.run
    with mock.patch.object(TrainStep, "run", remember):
        try:
            make_task = with_synthetic_data(Task, VOCAB_SIZE)
            train_resolved(cfg, lambda resolved, tokenizer: make_task(resolved))
        except (UserError, ArithmeticError) as error:
            return str(error)
    return weights[-1]


def test_an_undeclared_parameter_is_rejected_where_ranks_split_sequences(gloo_pool):
    messages = gloo_pool.run(train_with_a_custom_norm, 2, row("tp2-sp").argv, False)
    assert messages[0] == messages[1]
    assert "decoder.final_layernorm.weight (PlainNorm)" in messages[0] and "placement.parameter(" in messages[0]


def test_a_parameter_declared_as_in_megatron_lm_trains_as_on_one_rank(gloo_pool):
    """Each rank's gradient is a sum over its own positions: without the declaration copies drift at the first step."""
    layout = row("tp2-sp")
    single = gloo_pool.run(train_with_a_custom_norm, 1, [*layout.reference.argv, *THREE_STEPS], True)[0]
    ranks = gloo_pool.run(train_with_a_custom_norm, 2, [*layout.argv, *THREE_STEPS], True)
    assert ranks[0] == ranks[1] and ranks[0] == pytest.approx(single, abs=1e-6) and ranks[0] != [1.0] * len(single)


def test_replicas_are_compared_in_the_first_steps_without_being_asked(gloo_pool):
    messages = gloo_pool.run(train_with_drift, 2, [*row("dp2").argv, *THREE_STEPS], 1, flip_a_bit_of_a_weight)
    assert messages[0].startswith(SECOND) and messages[0] == messages[1]
    never = [*row("dp2").argv, *THREE_STEPS, "--check-replicas", "0"]
    assert gloo_pool.run(train_with_drift, 2, never, 1, flip_a_bit_of_a_weight) == [None, None]


def test_replicas_are_compared_in_three_steps_of_a_process_and_at_the_interval(monkeypatch):
    checked, states = [], [SimpleNamespace(iteration=number) for number in range(5, 22)]
    monkeypatch.setattr(ReplicaCheck, "check", lambda _, iteration: checked.append(iteration))
    hook = ReplicaCheck(10, SimpleNamespace(state=states[0]))
    for state in states[1:]:
        hook.on_step(state, None)
    assert checked == [6, 7, 8, 10, 20]
