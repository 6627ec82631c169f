"""Pipeline stages of GPTModel: full layers, half layers and custom layers."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.description import describe_gpt
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.sharding.placement import Partial
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.unit_tests.core.models.test_gpt_model import LLAMA, VOCAB, batch, make_config, make_model


def test_pipeline_stages_hold_global_names_and_compose():
    full = make_model(num_layers=4)
    first = make_model(num_layers=4, layer_range=range(0, 1), post_process=False)
    last = make_model(num_layers=4, layer_range=range(1, 4), pre_process=False)
    names = {**first.state_dict(), **last.state_dict()}
    assert names.keys() == full.state_dict().keys()
    assert all(torch.equal(names[name], value) for name, value in full.state_dict().items())
    tokens, labels, positions = batch()
    last.set_input_tensor(first(tokens, positions))
    assert torch.equal(last(tokens, positions, labels=labels), full(tokens, positions, labels=labels))
    assert len(last.decoder.layers) == 3 and last.decoder.layers[0].layer_number == 2
    assert (
        [layer.layer_number for layer in last.decoder.layers]
        == [2, 3, 4]
        == [last.decoder.layers[i].layer_number for i in (-3, -2, -1)]
    )


@pytest.mark.parametrize("fields", [{}, LLAMA, {"apply_residual_connection_post_layernorm": True}])
def test_stages_that_cut_layers_hold_half_of_the_names_and_compose(fields):
    full = make_model(num_layers=3, **fields)
    bounds = [0, 1, 2, 5, 6]
    stages = [
        make_model(num_layers=3, branches=range(*ends), pre_process=not ends[0], post_process=ends[1] == 6, **fields)
        for ends in zip(bounds, bounds[1:])
    ]
    names = [stage.state_dict().keys() for stage in stages]
    assert {name for local in names for name in local} == full.state_dict().keys()
    assert sum(map(len, names)) == len(full.state_dict())
    for local, present, absent in zip(
        names, ["self_attention", "mlp", "mlp", "mlp"], ["mlp", "self_attention", "layers.0.mlp", "self_attention"]
    ):
        assert any(present in name for name in local) and not any(absent in name for name in local)
    tokens, labels, positions = batch()
    hidden = None
    for stage in stages:
        stage.set_input_tensor(hidden)
        hidden = stage(tokens, positions, labels=labels if stage.post_process else None)
    torch.testing.assert_close(hidden, full(tokens, positions, labels=labels), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="layer_range and branches both"):
        make_model(num_layers=3, branches=range(2), layer_range=range(1))


class LayerOfAProgram(TransformerLayer):
    """One piece: what it adds belongs to no branch."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs) + self.mlp.linear_fc2.weight.sum()


def stage_of_two(rank, spec, **fields):
    """The second of two pipeline ranks needs no process group to be built."""
    groups = replace(SINGLE_PROCESS, pp=Group("pp", (0, 1), rank))
    options = {name: fields.pop(name) for name in ("share_embeddings_and_output_weights", "position_embedding_type")
               if name in fields}  # fmt: skip
    config = make_config(num_layers=3, pipeline_model_parallel_size=2, pipeline_dtype=torch.float64, **fields)
    if config.mtp_num_layers:
        options["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec)
    last = rank == 1
    return GPTModel(config, spec, VOCAB, 16, pre_process=not last, post_process=last, groups=groups, **options)


def test_prediction_depths_need_their_number_and_their_layers():
    spec, plain, predicting = get_gpt_layer_local_spec(), make_config(), make_config(mtp_num_layers=1)
    for config, depths in ((plain, get_gpt_mtp_block_spec(predicting, spec)), (predicting, None)):
        with pytest.raises(UserError, match=f"mtp_num_layers {config.mtp_num_layers} goes with mtp_block_spec"):
            GPTModel(config, spec, VOCAB, 16, mtp_block_spec=depths)


@pytest.mark.parametrize("fields", [
    {"init_method_std": 0.02, "embedding_init_method_std": 0.5},
    {"init_method_std": 0.02, "embedding_init_method_std": None},
    {"init_method_xavier_uniform": True, "embedding_init_method_std": 0.5},
    {"init_method_xavier_uniform": True},
], ids=["own std", "one std", "own std beside Xavier", "Xavier"])  # fmt: skip
def test_the_last_stages_copy_of_a_tied_embedding_begins_equal(fields):
    spec = get_gpt_layer_local_spec()
    first, last = (stage_of_two(rank, spec, share_embeddings_and_output_weights=True, **fields) for rank in (0, 1))
    words = first.embedding.word_embeddings.weight
    assert torch.equal(last.output_layer.weight, words) and last.output_layer.weight is not words
    copy = last.output_layer.weight.spec
    assert copy.tied_to == "embedding.word_embeddings.weight" and words.spec.tied_to is None
    assert copy.grad["embedding"] == words.spec.grad["embedding"] == Partial(), "each holds a part of the gradient"
    std = fields.get("embedding_init_method_std") or fields.get("init_method_std")
    assert std is None or words[:VOCAB].std().item() == pytest.approx(std, rel=0.1)
    untied = stage_of_two(1, spec, **fields).output_layer.weight[:VOCAB]
    other = fields.get("init_method_std", math.sqrt(2 / (VOCAB + 24)))
    assert untied.std().item() == pytest.approx(other, rel=0.15) and not torch.equal(untied, words[:VOCAB])


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_the_last_stages_copy_of_the_embedding_for_later_tokens_begins_equal(positions):
    spec, fields = get_gpt_layer_local_spec(), {"mtp_num_layers": 1, "embedding_init_method_std": 0.5}
    first, last = (
        stage_of_two(rank, spec, share_embeddings_and_output_weights=True, position_embedding_type=positions, **fields)
        for rank in (0, 1)
    )
    mine, copy = (dict(stage.embedding.named_parameters()) for stage in (first, last))
    assert mine.keys() == copy.keys() and all(torch.equal(mine[name], copy[name]) for name in mine)
    for name, weight in copy.items():
        assert weight.spec.tied_to == f"embedding.{name}" and mine[name].spec.tied_to is None
        assert weight.spec.grad["embedding"] == mine[name].spec.grad["embedding"] == Partial(), name


def held(model):
    layers = zip(model.decoder.layers.indices, model.decoder.layers)
    return [
        (index, "self_attention" in dict(layer.named_children()), "mlp" in dict(layer.named_children()))
        for index, layer in layers
    ]


def test_layers_that_are_one_piece_stay_uncut():
    """1.5 of 3 layers of equal halves are the best stage; else 2."""
    equal = {"ffn_hidden_size": 48}
    local = get_gpt_layer_local_spec()
    foreign = replace(local, module=LayerOfAProgram)
    assert held(stage_of_two(0, local, **equal)) == [(0, True, True), (1, True, False)]
    assert held(stage_of_two(1, local, **equal)) == [(1, False, True), (2, True, True)]
    assert [item[0] for item in held(stage_of_two(1, foreign, **equal))] in ([1, 2], [2])
    assert all(item[1:] == (True, True) for rank in (0, 1) for item in held(stage_of_two(rank, foreign, **equal)))
    full = held(stage_of_two(0, local, whole_layers_in_pipeline_split=True, **equal))
    assert all(item[1:] == (True, True) for item in full)
    with pytest.raises(ValueError, match="'a' cuts layer 2, which is built as one piece, at position 3"):
        stage_of_two(0, foreign, pipeline_model_parallel_layout="Eta|ftL")


class LayerOfAnotherKind(torch.nn.Linear):
    """Neither branches nor a description; slots that only it can read."""

    def __init__(self, config, submodules, layer_number, groups):
        super().__init__(config.hidden_size, config.hidden_size, dtype=config.params_dtype)

    def forward(self, hidden_states, ctx):
        assert isinstance(ctx, ForwardContext)
        return super().forward(hidden_states)


def test_a_layer_of_another_kind_is_one_unknown_piece():
    spec = replace(get_gpt_layer_local_spec(), module=LayerOfAnotherKind, submodules=object())
    config = make_config()
    model = GPTModel(config, spec, VOCAB, 16)
    tokens, labels, positions = batch()
    assert model(tokens, positions, labels=labels).isfinite().all()
    described = describe_gpt(config, vocab_size=VOCAB, seq_length=16, max_sequence_length=16, spec=spec)
    assert described.unknown == ["layer"] and described.costs == ((("layer",),) * 2, None, 0.0)
